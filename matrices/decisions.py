"""What the fields of a model's config decide about single axes, one rule for each, as decisions that name the fields.

A rule yields decisions, and refusals for what the model has and no cell can express: never is something left out
without a word.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .configs import Config, Field

KV_HEADS = 2  # of the cells of a model: more would show no other fault and cost more
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
KV_CODECS = {("float", 8): "fp8_e4m3fn", ("int", 8): "int8", ("int", 4): "int4"}
KV_ALGORITHMS = {"FP8": "fp8_e4m3fn", "INT8": "int8"}
STRATEGIES = {
    "tensor": "tensor",
    "head": "head",
    "attn_head": "head",
    "channel": "channel",
    "token": "token_head",
}
# Fields that say that a model selects keys, and where the length of a block stands; none: it selects tokens.
SELECTORS = (
    ("index_topk", None),
    ("sparse_config.topk", "sparse_config.block_size"),
    ("block_counts", "block_size"),
    ("moba_topk", "moba_chunk_size"),
)
ROPE_FIELDS = ("rope_theta", "rope_parameters", "rope_scaling", "rotary_emb_base", "rotary_pct", "rotary_dim")
ROPE_TYPES = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "gpt_neox", "gptj", "phi", "glm", "glm4")
INTERLEAVED_TYPES = ("gptj", "codegen", "glm", "glm4", "chatglm", "cohere", "cohere2")
SINK_TYPES = ("gpt_oss",)  # their sinks are weights that no field names
FULL, SLIDING = {"full_attention", "attention"}, "sliding_attention"  # as layer_types has them
ALTERNATING_TYPES = ("gemma2",)  # every other layer slides; their older configs have no layer_types


@dataclass(frozen=True)
class Decision:
    """One axis. `where`: which cells the model triggers, as `--where` reads it. `brings`: the value, as ids write it,
    that other cells are brought to; empty: they are left out. `because`: the fields and their values.
    """

    axis: str
    where: str
    brings: str
    because: str


@dataclass(frozen=True)
class Refusal:
    """What the model has and no cell: `whole` where that leaves no cell at all."""

    message: str
    whole: bool = True


Found = Iterator[Decision | Refusal]


def fixed(axis: str, value: str, because: str) -> Decision:
    """The model has this value and no other: every cell is brought to it."""
    return Decision(axis, f"{axis}={value}", value, because)


def only(axis: str, because: str, *values: str) -> Decision:
    """The model triggers these values: cells with others are left out."""
    return Decision(axis, " or ".join(f"{axis}={value}" for value in values), "", because)


def _said(*fields: Field | None) -> str:
    return ", ".join(str(field) for field in fields if field is not None)


def _model_type(config: Config) -> str:
    field = config.text("model_type")
    return field.value if field else ""


def _dtype(config: Config) -> Found:
    field = config.text("torch_dtype", "dtype")
    if field is None:
        yield Decision("dtype", "dtype=bf16 or dtype=fp16", "bf16", "no torch_dtype or dtype: both of 16 bits")
        return
    name = field.value.removeprefix("torch.")
    if name not in DTYPES:
        raise config.error(f"{field.name} must be one of {', '.join(DTYPES)}, got {field.value!r}")
    yield fixed("dtype", DTYPES[name], _said(field))


def _query_heads(config: Config) -> Field:
    field = config.integer("num_attention_heads", "n_head", "n_heads", "num_heads")
    if field is None:
        raise config.error("the field num_attention_heads is missing (or n_head, n_heads, num_heads)")
    return field


def _heads(config: Config) -> Found:
    """The model's ratio of query heads to KV heads, with at most `KV_HEADS` of these."""
    query = _query_heads(config)
    kv = config.integer("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
    single = None if kv else config.flag("multi_query")
    count = kv.value if kv else 1 if single and single.value else query.value
    if query.value % count:
        raise config.error(f"{query.name} {query.value} is no multiple of {kv.name if kv else 'KV heads'} {count}")
    ratio, few = query.value // count, min(KV_HEADS, count)
    because = _said(query, kv or single) if kv or single else f"{_said(query)}, no num_key_value_heads"
    yield fixed("heads", f"{ratio * few}-{few}", f"{because}: ratio {ratio}, {few} of {count} KV heads")


def head_dim(config: Config) -> tuple[int, str]:
    """Channels of a head, and the fields that say so. Raises ModelError where none does."""
    own = config.integer("head_dim", "d_kv", "kv_channels")
    if own is not None:
        return own.value, _said(own)
    width = config.integer("hidden_size", "n_embd", "d_model")
    if width is None:
        raise config.error("the field head_dim is missing, and hidden_size (or n_embd, d_model) to derive it from")
    heads = _query_heads(config)
    if width.value % heads.value:
        raise config.error(f"{width.name} {width.value} is no multiple of {heads.name} {heads.value}: head_dim needed")
    return width.value // heads.value, f"{_said(width, heads)}, no head_dim"


def _dim(config: Config) -> Found:
    """Head dimensions of keys and values; of latent attention the expanded form, in which prefill computes."""
    rank = config.integer("kv_lora_rank")
    if rank is None:
        dim, because = head_dim(config)
        yield fixed("dim", str(dim), because)
        yield fixed("vdim", "0", because)
        return
    parts = {name: config.integer(name) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")}
    nope, rope, values = parts.values()
    if nope is None or rope is None or values is None:
        missing = ", ".join(name for name, field in parts.items() if field is None)
        raise config.error(f"kv_lora_rank {rank.value} needs the field {missing}, which is missing")
    keys, because = nope.value + rope.value, _said(nope, rope, values)
    yield fixed("dim", str(keys), because)
    yield fixed("vdim", "0" if values.value == keys else str(values.value), because)
    latent = f"dim:{rank.value + rope.value}/vdim:{rank.value}"
    yield Refusal(f"the latent form, {latent} with one KV head, is no part of this subset ({_said(rank, rope)})", False)


def _position(config: Config) -> Found:
    """RoPE in the kernel, or keys that were rotated before they were cached (`none`): engines do either."""
    buckets = config.integer("relative_attention_num_buckets")
    alibi = config.flag("alibi", "attn_config.alibi")
    kind = _model_type(config)
    rope = config.find(*ROPE_FIELDS)
    if buckets:
        yield fixed("pos", "buckets", f"{_said(buckets)} (8 in a cell)")
    elif (alibi and alibi.value) or kind == "bloom":
        yield fixed("pos", "alibi", _said(alibi) or f"model_type {kind}")
    elif rope is None and kind not in ROPE_TYPES:
        yield only("pos", f"none of {', '.join(ROPE_FIELDS)}", "none")
    else:
        yield from _rope(config, rope.name if rope else f"model_type {kind}")


def _rope(config: Config, because: str) -> Found:
    """Cells turn all channels in half-split pairs, or half of them in interleaved pairs; nothing else."""
    part = config.number("partial_rotary_factor", "rope_parameters.partial_rotary_factor", "rotary_pct", high=1)
    share, turned = (part.value, part) if part else (1, None)
    if part is None and (turned := config.integer("rotary_dim")):
        share = turned.value / head_dim(config)[0]
    flag = config.flag("rope_interleave", "rotary_interleaved")
    kind = _model_type(config)
    interleaved = flag.value if flag else kind in INTERLEAVED_TYPES
    pairs = _said(flag) or (f"model_type {kind}" if interleaved else "")
    said = ", ".join(each for each in (because, _said(turned), pairs) if each)
    names = {(1, False): "rope", (0.5, True): "rope-interleaved"}
    name = names.get((share, interleaved))
    if name is None:
        layout = "interleaved" if interleaved else "half-split"
        yield Refusal(f"RoPE over {share:g} of the channels in {layout} pairs has no cell ({said})", whole=False)
        yield only("pos", f"{said}: keys cached rotated", "none")
    else:
        yield only("pos", f"{said}: keys cached rotated, or turned in the kernel", "none", name)


def _cap(config: Config) -> Found:
    field = config.number("attn_logit_softcapping", high=1e6)
    if field is None or not field.value:
        yield only("cap", _said(field) or "no attn_logit_softcapping", "0")
    elif field.value != int(field.value):
        yield Refusal(f"{field.name} {field.value}: axis cap takes integers")
    else:
        yield fixed("cap", str(int(field.value)), _said(field))


def _sink(config: Config) -> Found:
    kind = _model_type(config)
    if kind in SINK_TYPES:
        yield fixed("sink", "on", f"model_type {kind}: a learned sink logit for each head")
    else:
        yield only("sink", f"model_type {kind or 'missing'}: no sink logits", "off")


def _layer_types(types: Field) -> Iterator[Refusal]:
    """Layers of other kinds, such as chunked or linear attention."""
    others = [name for name in dict.fromkeys(types.value) if name not in (*FULL, SLIDING)]
    for name in others:
        yield Refusal(f"{types.name} {name} has no cell", whole=set(types.value) <= set(others))


def _sliding(config: Config) -> tuple[bool, bool, str]:
    """Whether some layers slide, whether some see everything, and which fields say so."""
    types, size = config.texts("layer_types"), config.integer("sliding_window")
    use, kind = config.flag("use_sliding_window"), _model_type(config)
    if types:
        times = Counter(types.value)
        said = f"{types.name} " + ", ".join(f"{n} {name}" for name, n in times.items())
        return SLIDING in times, bool(times.keys() & FULL), said
    if size is None:
        return False, True, "no sliding_window"
    if not (use.value if use else not kind.startswith("qwen")):
        return False, True, _said(use) or f"model_type {kind}, no use_sliding_window"
    first, layers = config.integer("max_window_layers", low=0), config.integer("num_hidden_layers")
    if use and first and layers:
        return first.value < layers.value, first.value > 0, _said(size, use, first, layers)
    period = config.integer("sliding_window_pattern", "_sliding_window_pattern")
    if (period and period.value > 1) or kind in ALTERNATING_TYPES:
        return True, True, f"{_said(size)}, {_said(period) or f'model_type {kind}'}"
    return True, False, f"{_said(size)} in every layer"


def _window(config: Config) -> Found:
    """`sliding_window` counts the query's own key: window_left is one less. A cell with a small window stays: it cuts
    at the cell's size as the model's window does at its own.
    """
    if types := config.texts("layer_types"):
        yield from _layer_types(types)
    sliding, full, because = _sliding(config)
    size = config.integer("sliding_window")
    if not sliding:
        yield Decision("window", "window<0", "", because)
    elif size is None:
        raise config.error("the field sliding_window is missing, and layer_types names sliding_attention")
    elif full:
        yield Decision("window", "", "", f"{because}: layers with a window and without")
    else:
        yield Decision("window", "window>=0", str(size.value - 1), because)


def _selection(config: Config) -> Found:
    """What one entry of a list names; a model without a selector leaves that to the engine."""
    for name, block in SELECTORS:
        selector = config.integer(name)
        if selector is None:
            continue
        if block is None:
            yield fixed("block", "1", f"{_said(selector)}: tokens are selected")
            return
        length = config.integer(block)
        if length is None:
            raise config.error(f"the field {block} is missing, and {selector} selects blocks")
        yield fixed("block", str(length.value), _said(selector, length))
        return


def _causal(config: Config) -> Found:
    both, causal = config.flag("use_bidirectional_attention"), config.flag("is_causal")
    if (both and both.value) or (causal and not causal.value):
        yield fixed("causal", "none", _said(both, causal))
    else:
        because = _said(causal) or "no use_bidirectional_attention: a decoder, whose last query sees all"
        yield Decision("causal", "phase=decode or causal=bottom_right", "bottom_right", because)


def _dropout(config: Config) -> Found:
    field = config.number("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", high=0.99)
    percent = round(100 * field.value) if field else 0
    because = _said(field) or "no attention_dropout"
    if percent:
        where = f"dropout=0 or dropout={percent}"
        yield Decision("dropout", where, str(percent), f"{because}: in training only")
    else:
        yield only("dropout", because, "0")


def _codecs(config: Config) -> Found:
    """KV in codes where the config says so; what an engine's own option decides stands in no config."""
    inside = "quantization_config.kv_cache_scheme"
    scheme, algorithm = config.find(inside), config.text("quantization_config.kv_cache_quant_algo")
    if scheme is None and algorithm is None:
        yield only("kcodec", f"no {inside}", "none")
        yield only("vcodec", f"no {inside}", "none")
        return
    if scheme is not None:
        kind, bits = config.text(f"{inside}.type"), config.integer(f"{inside}.num_bits")
        said, codec = _said(kind, bits), KV_CODECS.get((kind.value if kind else "", bits.value if bits else 0))
    else:
        assert algorithm is not None
        said, codec = _said(algorithm), KV_ALGORITHMS.get(algorithm.value)
    strategy, symmetric = config.text(f"{inside}.strategy"), config.flag(f"{inside}.symmetric")
    scales = STRATEGIES.get(strategy.value) if strategy else "tensor"
    if codec is None or scales is None:
        yield Refusal(f"KV in codes as of {said or scheme}{', ' + _said(strategy) if strategy else ''} has no cell")
        return
    yield fixed("kcodec", codec, said)
    yield fixed("vcodec", codec, said)
    yield fixed("scales", scales, _said(strategy) or f"no {inside}.strategy: one scale")
    if symmetric is None or symmetric.value or codec.startswith("fp8"):
        yield fixed("zeros", "off", _said(symmetric) or f"no {inside}.symmetric: no zero points")


def _never(config: Config) -> Found:
    """What no model of this kind has, whatever its fields."""
    yield only("kind", "no field: selectors name sets", "set")
    yield only("epilogue", "no field: out goes on as it is", "none")
    yield only("lists", "no field: the query heads of a KV head select together", "kv_head")
    gate = config.flag("attn_output_gate")
    if gate and gate.value:
        yield Refusal(f"{gate}: no cell gates out", whole=False)


RULES: tuple[Callable[[Config], Found], ...] = (
    _dtype,
    _heads,
    _dim,
    _selection,
    _causal,
    _window,
    _position,
    _cap,
    _sink,
    _dropout,
    _codecs,
    _never,
)
