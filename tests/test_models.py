"""Which cells a model triggers, and why: hand-written samples of public configs, and what is wrong with bad ones."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from sacts.conformance.build import build
from sacts.conformance.cli import app
from sacts.matrices import models, tiers
from sacts.matrices.cell import Cell, parse, value_text
from sacts.matrices.configs import ModelError, config_of
from sacts.matrices.strategies import cells

CONFIGS = Path(__file__).parent / "configs"
SAMPLES = sorted(path.stem for path in CONFIGS.glob("*.json"))
TIERS = {name: tiers.load(tiers.path_of(name)) for name in ("smoke", "terms", "codecs", "long")}

# What each sample decides: the axis, the values that its cells may have, and the fields that say so.
WHY: dict[str, dict[str, tuple[set[str], str]]] = {
    "llama-3.1-8b": {
        "dtype": ({"bf16"}, "torch_dtype bfloat16"),
        "heads": ({"8-2"}, "num_attention_heads 32, num_key_value_heads 8: ratio 4, 2 of 8 KV heads"),
        "dim": ({"128"}, "hidden_size 4096, num_attention_heads 32, no head_dim"),
        "window": ({"-1"}, "no sliding_window"),
        "pos": ({"none", "rope"}, "rope_theta: keys cached rotated, or turned in the kernel"),
        "cap": ({"0"}, "no attn_logit_softcapping"),
        "sink": ({"off"}, "model_type llama: no sink logits"),
        "dropout": ({"0"}, "attention_dropout 0.0"),
        "kcodec": ({"none"}, "no quantization_config.kv_cache_scheme"),
        "kind": ({"set"}, "no field: selectors name sets"),
    },
    "qwen2.5-7b": {
        "heads": ({"14-2"}, "num_attention_heads 28, num_key_value_heads 4: ratio 7, 2 of 4 KV heads"),
        "window": ({"-1"}, "use_sliding_window False"),
    },
    "qwen3-8b-fp8-kv": {
        "dim": ({"128"}, "head_dim 128"),
        "window": (
            {"-1", "20"},
            "sliding_window 32768, use_sliding_window True, max_window_layers 28, num_hidden_layers 36: "
            "layers with a window and without",
        ),
        "kcodec": (
            {"fp8_e4m3fn"},
            "quantization_config.kv_cache_scheme.type float, quantization_config.kv_cache_scheme.num_bits 8",
        ),
        "scales": ({"tensor"}, "quantization_config.kv_cache_scheme.strategy tensor"),
        "zeros": ({"off"}, "quantization_config.kv_cache_scheme.symmetric True"),
    },
    "mistral-7b": {"window": ({"4095", "20"}, "sliding_window 4096 in every layer")},
    "gemma-2-9b": {
        "dim": ({"256"}, "head_dim 256"),
        "heads": ({"4-2"}, "num_attention_heads 16, num_key_value_heads 8: ratio 2, 2 of 8 KV heads"),
        "cap": ({"50"}, "attn_logit_softcapping 50.0"),
        "window": (
            {"-1", "20"},
            "sliding_window 4096, model_type gemma2: layers with a window and without",
        ),
    },
    "gemma-3-12b": {
        "dtype": ({"bf16"}, "torch_dtype bfloat16"),
        "dim": ({"256"}, "text_config.head_dim 256"),
        "cap": ({"0"}, "no attn_logit_softcapping"),
        "window": (
            {"-1", "20"},
            "text_config.sliding_window 1024, text_config.sliding_window_pattern 6: layers with a window and without",
        ),
    },
    "gpt-oss-20b": {
        "dtype": ({"bf16", "fp16"}, "no torch_dtype or dtype: both of 16 bits"),
        "heads": ({"16-2"}, "num_attention_heads 64, num_key_value_heads 8: ratio 8, 2 of 8 KV heads"),
        "sink": ({"on"}, "model_type gpt_oss: a learned sink logit for each head"),
        "window": (
            {"-1", "20"},
            "layer_types 2 sliding_attention, 2 full_attention: layers with a window and without",
        ),
    },
    "phi-2": {
        "dtype": ({"fp16"}, "torch_dtype float16"),
        "heads": ({"2-2"}, "num_attention_heads 32, num_key_value_heads 32: ratio 1, 2 of 32 KV heads"),
        "dim": ({"80"}, "hidden_size 2560, num_attention_heads 32, no head_dim"),
        "pos": ({"none"}, "rope_theta, partial_rotary_factor 0.4: keys cached rotated"),
    },
    "glm-4-9b": {
        "heads": ({"32-2"}, "num_attention_heads 32, num_key_value_heads 2: ratio 16, 2 of 2 KV heads"),
        "pos": (
            {"none", "rope-interleaved"},
            "rope_theta, partial_rotary_factor 0.5, model_type glm4: keys cached rotated, or turned in the kernel",
        ),
    },
    "gpt2": {
        "heads": ({"2-2"}, "n_head 12, no num_key_value_heads: ratio 1, 2 of 12 KV heads"),
        "dim": ({"64"}, "n_embd 768, n_head 12, no head_dim"),
        "pos": (
            {"none"},
            "none of rope_theta, rope_parameters, rope_scaling, rotary_emb_base, rotary_pct, rotary_dim",
        ),
        "dropout": ({"0", "10"}, "attn_pdrop 0.1: in training only"),
    },
    "qwen-blocks": {"block": ({"64"}, "block_counts 16, block_size 64")},
    "deepseek-v3.2": {"block": ({"1"}, "index_topk 2048: tokens are selected")},
}
# One cell for each value that a model may trigger or not, whatever tiers hold.
OWN = [
    parse(text)
    for text in (
        "decode/fp16/kv:90",
        "decode/bf16/kv:90/heads:8-2/dim:128",
        "decode/fp32/kv:90/block:16/window:20",
        "prefill/fp16/kv:90/q:3/causal:bottom_right",
        "prefill/fp16/kv:90/q:3",
        "decode/bf16/kv:90/pos:rope",
        "decode/bf16/kv:90/pos:rope-interleaved",
        "decode/bf16/kv:90/pos:alibi",
        "decode/bf16/kv:90/pos:buckets",
        "decode/bf16/kv:90/cap:2",
        "decode/bf16/kv:90/sink:on",
        "decode/bf16/kv:90/dropout:25",
        "decode/bf16/kv:90/kind:multiset",
        "decode/bf16/kv:90/kcodec:int8/vcodec:int8/scales:page/zeros:on",
        "decode/bf16/kv:90/epilogue:relu",
    )
]


def sample(name: str) -> models.Model:
    return models.load(CONFIGS / f"{name}.json")


def model(**fields: Any) -> models.Model:
    """A small model of heads and dimensions, with other fields; None takes one away."""
    base = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64} | fields
    return models.model_of(config_of({name: value for name, value in base.items() if value is not None}))


def because(found: models.Model, axis: str) -> str:
    (decision,) = (each for each in found.decisions if each.axis == axis)
    return decision.because


def values(found: models.Model, axis: str) -> set[str]:
    """The values of an axis in the cells of `OWN` that a model triggers."""
    return {value_text(cell, axis) for cell in models.subset(found, OWN).cells}


@pytest.mark.parametrize(("name", "axis"), [(name, axis) for name, axes in WHY.items() for axis in axes])
def test_a_sample_triggers_these_values_and_says_why(name: str, axis: str) -> None:
    triggered, said = WHY[name][axis]
    assert because(sample(name), axis) == said
    assert values(sample(name), axis) == triggered


def test_every_sample_is_looked_at() -> None:
    assert set(SAMPLES) == WHY.keys()


@pytest.mark.parametrize("name", SAMPLES)
def test_the_document_says_how_many_cells_a_sample_triggers(name: str) -> None:
    document = (CONFIGS.parent.parent / "docs/matrix.md").read_text(encoding="utf-8")
    (line,) = (line for line in document.splitlines() if line.startswith(f"| `{name}`"))
    triggered = [str(len(models.subset(sample(name), TIERS[tier]).cells)) for tier in ("smoke", "terms")]
    assert [cell.strip() for cell in line.split("|")[3:5]] == triggered


@pytest.mark.parametrize("name", SAMPLES)
def test_every_cell_that_a_sample_triggers_can_be_built(name: str) -> None:
    for cell in models.subset(sample(name), (*TIERS["smoke"], *TIERS["terms"])).cells:
        assert build(cell).spec.head_dim_qk == cell.dim


# --- what a subset is, stated again without filters


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.lists(cells(cost=math.inf), min_size=1, max_size=5),
    st.fixed_dictionaries(
        {
            "num_attention_heads": st.sampled_from([8, 16]),
            "num_key_value_heads": st.sampled_from([1, 2, 8]),
            "head_dim": st.sampled_from([64, 80, 128]),
            "torch_dtype": st.sampled_from(["bfloat16", "float16"]),
            "sliding_window": st.sampled_from([None, 128]),
            "attn_logit_softcapping": st.sampled_from([None, 30.0]),
            "rope_theta": st.sampled_from([None, 1e4]),
        }
    ),
)
def test_every_cell_of_a_subset_has_what_the_model_has_and_stands_there_once(
    tier: list[Cell], fields: dict[str, Any]
) -> None:
    found = models.subset(model(**fields), tier)
    assert len({cell.id for cell in found.cells}) == len(found.cells)
    assert len(found.cells) + found.twice + sum(found.left_out.values()) == len(tier)
    for cell in found.cells:
        assert parse(cell.id) == cell
        assert cell.dtype == {"bfloat16": "bf16", "float16": "fp16"}[fields["torch_dtype"]]
        assert cell.dim == fields["head_dim"]
        assert cell.heads[0] * fields["num_key_value_heads"] == cell.heads[1] * fields["num_attention_heads"]
        assert cell.heads[1] == min(2, fields["num_key_value_heads"])
        assert cell.cap == (fields["attn_logit_softcapping"] or 0)
        assert (cell.window >= 0) == (fields["sliding_window"] is not None)
        assert cell.pos in ("none", "rope")[: 1 + (fields["rope_theta"] is not None)]
        assert cell.phase == "decode" or cell.causal == "bottom_right"
        assert (cell.dropout, cell.kind, cell.sink, cell.kcodec, cell.epilogue) == (0, "set", "off", "none", "none")


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("name", SAMPLES)
def test_what_no_field_decides_stays_as_the_tier_has_it(name: str, tier: str) -> None:
    found = sample(name)
    there = {tuple(value_text(cell, axis) for axis in found.undecided) for cell in TIERS[tier]}
    for cell in models.subset(found, TIERS[tier]).cells:
        assert tuple(value_text(cell, axis) for axis in found.undecided) in there


def test_a_subset_of_a_subset_is_the_same() -> None:
    for name in SAMPLES:
        once = models.subset(sample(name), TIERS["smoke"])
        again = models.subset(sample(name), once.cells)
        assert again == models.Subset(once.cells, again.left_out, 0)
        assert (again.left_out == {}) or not once.cells


def test_cells_that_become_alike_stand_once() -> None:
    tier = [parse("decode/bf16/kv:17"), parse("decode/fp16/kv:17"), parse("decode/fp16/kv:17/heads:8-2")]
    found = models.subset(model(torch_dtype="bfloat16"), tier)
    assert ([cell.id for cell in found.cells], found.twice) == (["decode/bf16/kv:17/heads:8-2"], 2)


# --- single fields


@pytest.mark.parametrize(
    ("fields", "axis", "expected"),
    [
        ({"dtype": "float32"}, "dtype", {"fp32"}),
        ({"torch_dtype": "torch.float16"}, "dtype", {"fp16"}),
        ({"num_key_value_heads": None}, "heads", {"2-2"}),
        ({"num_key_value_heads": None, "multi_query": True}, "heads", {"8-1"}),
        ({"rope_theta": 1e4, "rope_interleave": True, "partial_rotary_factor": 0.5}, "pos",
         {"none", "rope-interleaved"}),
        ({"rope_theta": 1e4, "partial_rotary_factor": 0.5}, "pos", {"none"}),
        ({"rotary_dim": 32, "model_type": "gptj"}, "pos", {"none", "rope-interleaved"}),
        ({"model_type": "llama"}, "pos", {"none", "rope"}),
        ({"alibi": True}, "pos", {"alibi"}),
        ({"alibi": False, "rope_theta": 1e4}, "pos", {"none", "rope"}),
        ({"model_type": "bloom"}, "pos", {"alibi"}),
        ({"relative_attention_num_buckets": 32}, "pos", {"buckets"}),
        ({"sparse_config": {"topk": 64, "block_size": 64}}, "block", {"64"}),
        ({"moba_topk": 3, "moba_chunk_size": 32}, "block", {"32"}),
        ({"is_causal": False}, "causal", {"none"}),
        ({"sliding_window": 8, "layer_types": ["full_attention"]}, "window", {"-1"}),
        ({"sliding_window": 8, "layer_types": ["sliding_attention"]}, "window", {"7", "20"}),
        ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 4, "num_hidden_layers": 4}, "window",
         {"-1"}),
        ({"model_type": "qwen2", "sliding_window": 8}, "window", {"-1"}),
        ({"quantization_config": {"kv_cache_quant_algo": "INT8"}}, "vcodec", {"int8"}),
        ({"quantization_config": {"kv_cache_scheme": {"type": "int", "num_bits": 8, "strategy": "channel"}}}, "scales",
         {"channel"}),
        ({"quantization_config": {"quant_method": "fp8"}}, "kcodec", {"none"}),
    ],
)  # fmt: skip
def test_a_field_decides_its_axis(fields: dict[str, Any], axis: str, expected: set[str]) -> None:
    assert values(model(**fields), axis) == expected


@pytest.mark.parametrize(
    ("fields", "words", "whole"),
    [
        ({"rotary_pct": 0.25}, "RoPE over 0.25 of the channels in half-split pairs", False),
        ({"rope_theta": 1e4, "rope_interleave": True}, "RoPE over 1 of the channels in interleaved pairs", False),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layer_types chunked_attention has no cell", False),
        ({"layer_types": ["linear_attention"]}, "layer_types linear_attention has no cell", True),
        ({"attn_output_gate": True}, "attn_output_gate True: no cell gates out", False),
        ({"attn_logit_softcapping": 30.5}, "attn_logit_softcapping 30.5: axis cap takes integers", True),
        ({"quantization_config": {"kv_cache_quant_algo": "NVFP4"}}, "KV in codes as of", True),
        ({"quantization_config": {"kv_cache_scheme": {"type": "float", "num_bits": 8, "strategy": "group"}}},
         "strategy group has no cell", True),
    ],
)  # fmt: skip
def test_what_has_no_cell_is_refused_in_words(fields: dict[str, Any], words: str, whole: bool) -> None:
    found = model(**fields)
    (refusal,) = found.refusals
    assert words in refusal.message
    assert (not models.subset(found, TIERS["smoke"]).cells) is whole


def test_latent_attention_is_triggered_in_its_expanded_form_and_refused_in_the_other() -> None:
    found = sample("deepseek-v3.2")
    assert [refusal.message for refusal in found.refusals] == [
        "the latent form, dim:576/vdim:512 with one KV head, is no part of this subset (kv_lora_rank 512, "
        "qk_rope_head_dim 64)"
    ]
    cells = models.subset(found, TIERS["smoke"]).cells
    assert {(cell.dim, cell.vdim) for cell in cells} == {(192, 128)}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_attention_heads": None}, ("num_attention_heads is missing",)),
        ({"head_dim": None}, ("head_dim is missing", "hidden_size")),
        ({"head_dim": None, "hidden_size": 100}, ("hidden_size 100", "no multiple of num_attention_heads 8")),
        ({"num_key_value_heads": 3}, ("num_attention_heads 8", "no multiple of num_key_value_heads 3")),
        ({"num_attention_heads": "8"}, ("num_attention_heads must be an integer from 1, got '8'",)),
        ({"num_key_value_heads": 0}, ("num_key_value_heads must be an integer from 1, got 0",)),
        ({"head_dim": True}, ("head_dim must be an integer from 1, got True",)),
        ({"torch_dtype": "float8"}, ("torch_dtype must be one of bfloat16, float16, float32, got 'float8'",)),
        ({"torch_dtype": 16}, ("torch_dtype must be text, got 16",)),
        ({"sliding_window": -1}, ("sliding_window must be an integer from 1, got -1",)),
        ({"layer_types": ["sliding_attention"]}, ("sliding_window is missing", "layer_types")),
        ({"layer_types": "full_attention"}, ("layer_types must be a list of texts",)),
        ({"use_sliding_window": 1}, ("use_sliding_window must be true or false, got 1",)),
        ({"attn_logit_softcapping": "50"}, ("attn_logit_softcapping must be a number from 0 to 1e+06, got '50'",)),
        ({"attention_dropout": 1.5}, ("attention_dropout must be a number from 0 to 0.99, got 1.5",)),
        ({"rope_theta": 1, "rotary_pct": 2}, ("rotary_pct must be a number from 0 to 1",)),
        ({"kv_lora_rank": 512, "qk_nope_head_dim": 128}, ("qk_rope_head_dim, v_head_dim, which is missing",)),
        ({"block_counts": 16}, ("block_size is missing", "block_counts 16")),
        ({"sparse_config": 3}, ("sparse_config must be an object, got 3",)),
        ({"quantization_config": {"kv_cache_scheme": "fp8"}}, ("kv_cache_scheme must be an object, got 'fp8'",)),
        ({"text_config": []}, ("text_config must be an object, got []",)),
        ({"model_type": 7}, ("model_type must be text, got 7",)),
    ],
)
def test_a_wrong_field_is_named_with_what_was_expected(fields: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ModelError) as caught:
        model(**fields)
    assert str(caught.value).startswith("config: ")
    assert [word for word in words if word not in str(caught.value)] == []


NAMES = (
    "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size", "torch_dtype", "model_type", "layer_types",
    "sliding_window", "use_sliding_window", "max_window_layers", "num_hidden_layers", "sliding_window_pattern",
    "rope_theta", "partial_rotary_factor", "rotary_dim", "rope_interleave", "alibi", "relative_attention_num_buckets",
    "attn_logit_softcapping", "attention_dropout", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
    "index_topk", "sparse_config", "block_counts", "block_size", "is_causal", "quantization_config", "text_config",
    "multi_query", "attn_output_gate",
)  # fmt: skip
KEYS = st.sampled_from(["topk", "kv_cache_scheme", "type"])
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 300) | st.floats() | st.sampled_from(["", "bfloat16", "llama"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(KEYS, inner),
    max_leaves=3,
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=6))
def test_whatever_a_config_holds_it_is_a_model_or_the_error_names_the_file(fields: dict[str, Any]) -> None:
    base = {"num_attention_heads": 8, "head_dim": 64} | fields
    try:
        found = models.model_of(config_of(json.loads(json.dumps(base)), "own.json"))
    except ModelError as error:
        assert str(error).startswith("own.json: ")
    else:
        assert models.subset(found, OWN).cells or found.refusals


def test_fields_of_the_text_part_come_first() -> None:
    found = models.model_of(
        config_of({"num_attention_heads": 4, "head_dim": 32, "text_config": {"num_attention_heads": 8, "head_dim": 64}})
    )
    assert because(found, "heads").startswith("text_config.num_attention_heads 8")
    assert because(found, "dim") == "text_config.head_dim 64"


# --- the command line


def sacts(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(arguments))
    return done.exit_code, " ".join(done.output.split())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is no JSON"),
        ("9" * 5000, "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        ("[1]", "a config is a JSON object, got list"),
        ("{}", "num_attention_heads is missing"),
    ],
    ids=["cut", "long", "deep", "list", "empty"],
)
def test_a_file_that_is_no_config_is_a_usage_error(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "c.json"
    path.write_text(text)
    for command in (
        ["matrix", "model", str(path)],
        ["matrix", "count", "--model", str(path)],
        ["run", "--model", str(path)],
    ):
        code, said = sacts(*command)
        assert code == 2
        assert words in said
    assert "cannot be read" in sacts("matrix", "model", str(tmp_path / "none.json"))[1]


def test_bytes_that_are_no_text_are_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_bytes(b"\xff\xfe")
    assert sacts("matrix", "model", str(tmp_path / "c.json"))[0] == 2


def test_the_explanation_names_fields_axes_and_cells() -> None:
    code, said = sacts("matrix", "model", str(CONFIGS / "gpt-oss-20b.json"), "-t", "terms")
    assert code == 0
    for words in (
        "gpt_oss",
        "become heads:16-2",
        "num_attention_heads 64, num_key_value_heads 8",
        "undecided, the serving engine's: phase, kv, q",
        "left out 5: dropout=0: attention_dropout 0.0",
        "8 cells from 31 of terms",
        "decode/bf16/kv:70+33/heads:16-2/pos:rope/sink:on",
    ):
        assert words in said


@pytest.mark.parametrize("command", ["list", "count", "export"])
def test_each_look_at_the_matrix_takes_a_model(command: str) -> None:
    config = str(CONFIGS / "llama-3.1-8b.json")
    code, said = sacts("matrix", command, "--model", config)
    assert code == 0
    assert {"list": "heads:8-2/dim:128", "count": "40 cells", "export": "heads:8-2/dim:128"}[command] in said
    assert "window" not in said


def test_the_jobs_of_a_model_hold_its_cells_each_once() -> None:
    config = str(CONFIGS / "mistral-7b.json")
    jobs = json.loads(sacts("matrix", "export", "--model", config, "--shards", "3")[1])
    triggered = [cell.id for cell in models.subset(sample("mistral-7b"), TIERS["smoke"]).cells]
    assert sorted(cell for job in jobs for cell in job["cells"]) == sorted(triggered)


def test_list_narrows_what_a_model_triggers() -> None:
    config = str(CONFIGS / "llama-3.1-8b.json")
    code, said = sacts("matrix", "list", "--model", config, "--where", "splits=8", "--json")
    assert code == 0
    assert all("splits:8" in cell and "dim:128" in cell for cell in json.loads(said))


def test_a_model_without_cells_is_a_usage_error_that_says_why() -> None:
    code, said = sacts("run", "--model", str(CONFIGS / "deepseek-v3.2.json"), "--where", "dim=64 and vdim=64")
    assert code == 2
    assert "dim=64 and vdim=64" in said


def test_a_model_beside_named_cells_is_a_usage_error() -> None:
    code, said = sacts("run", "decode/fp16/kv:17", "--model", str(CONFIGS / "gpt2.json"))
    assert code == 2
    assert "--model narrow a tier" in said


def test_run_judges_the_cells_of_a_model(tmp_path: Path) -> None:
    config = str(CONFIGS / "phi-2.json")
    code, said = sacts(
        "run", "-a", "sdpa", "--model", config, "--where", "kv<16", "-n", "1", "--report", str(tmp_path / "report")
    )
    assert code == 0, said
    records = (tmp_path / "report" / "records.jsonl").read_text()
    assert '"decode/fp16/kv:1/heads:2-2/dim:80/pattern:all"' in records
