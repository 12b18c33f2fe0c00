"""The bundled kernels in parts: decoders, epilogues and dropout against torch and Random123's recurrence in integers,
tables and lists against loops.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import compiled_kernels
import interpreted_kernels as made_by
import numpy as np
import pytest
import torch

from sacts.conformance.adapter import PADDING, Case, Refused
from sacts.kernels_under_test.paged.adapter import Adapter
from sacts.kernels_under_test.paged.arguments import shared_strides
from sacts.kernels_under_test.paged.copies import DESCRIPTION_BYTES
from sacts.kernels_under_test.paged.plan import Plan, plan_of
from sacts.kernels_under_test.paged.tables import (
    LOG2E,
    bias_by_distance,
    dropout_words,
    paired_channels,
    positions_of,
    turns_bytes,
    turns_of,
)
from sacts.matrices import tiers
from sacts.matrices.cell import parse
from sacts.reference.spec import (
    AttentionSpec,
    CandidateKind,
    CausalRule,
    Dropout,
    DType,
    EmptyRowRule,
    Hints,
    RelativeBuckets,
    RoPE,
    RopeLayout,
)

Made = dict[str, np.ndarray[Any, np.dtype[Any]]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    path = tmp_path_factory.mktemp("kernels") / "made.npz"
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, made_by.__file__, str(path)], check=True, env=environment, timeout=120)
    return dict(np.load(path))


# --- compilation

SHARED = 227 << 10  # bytes of shared memory that a block may have on the newest architecture that is asked for
COMPILED = (
    "decode/bf16/kv:60/heads:4-1/dim:576/vdim:512/pos:rope",
    "decode/bf16/kv:60/heads:128-1/dim:576/vdim:512",
    "decode/fp32/kv:60/heads:128-1/dim:576/vdim:512",
    "decode/bf16/kv:60/heads:128-1/dim:192/vdim:128",
    "decode/fp16/kv:60/heads:128-1/dim:256/pos:rope",
    "decode/bf16/kv:40",
    "decode/fp16/kv:60/pattern:all/splits:2/tile:16/pos:rope/cap:30/sink:on/dropout:25/epilogue:cast",
    "decode/bf16/kv:60+40/dim:80/pattern:all/kcodec:int4/vcodec:fp8_e4m3fn/scales:page_channel/zeros:on/route:gather",
    "decode/bf16/kv:60/pattern:all/kcodec:int8/vcodec:fp8_e5m2/scales:page",  # words
    "decode/bf16/kv:150+9/splits:2/tile:32/schedule:persistent/route:gather_heads",
    "decode/bf16/kv:90+40/heads:8-2/splits:2/tile:16/pos:rope/epilogue:gate/route:gather/lists:query_head",
    "prefill/fp16/kv:60+25/q:3+2/epilogue:gate/lists:query_head",
    "prefill/bf16/kv:60/q:8/block:16/pattern:all/causal:bottom_right/qtile:4",
)
COPIED = "prefill/bf16/kv:100+37/q:33+8/dim:128/page:128/block:128/pattern:all/causal:bottom_right/tile:128/qtile:32"
LOADED_AHEAD = "decode/bf16/kv:150/dim:128/tile:32"  # a list of tokens
TIER = os.environ.get("SACTS_COMPILE")  # the name of a tier to compile as a whole


def test_what_is_launched_compiles_for_a_gpu_and_fits_shared_memory() -> None:
    chosen = tiers.load(tiers.path_of(TIER)) if TIER else [parse(cell) for cell in (*COMPILED, LOADED_AHEAD, COPIED)]
    cells = [cell.id for cell in chosen if cell.phase in ("decode", "prefill")]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, compiled_kernels.__file__, "plain" if TIER else "traced", *cells]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    said = [json.loads(line) for line in done.stdout.splitlines()]
    seconds, largest = (f([each[name] for each in said]) for f, name in ((sum, "seconds"), (max, "shared")))
    print(f"{len(said)} kernels compiled in {seconds:.0f} s; at most {largest} bytes of shared memory")
    reached = {each["cell"] for each in said if each["kernel"] in ("attention_kernel", "refused")}
    assert reached == {cell.id for cell in chosen if cell.id in cells and cell.fallback == "none"}
    assert largest <= SHARED
    split = {cell.id for cell in chosen if cell.splits > 1}
    for each in said:  # the merge kernel is launched while the attention kernel runs, and waits for its end
        told = each["kernel"] == "attention_kernel" and each["cell"] in split
        merges = each["kernel"] == "merge_kernel"
        order = ["launch_dependents"] * told + ["wait"] * merges
        assert (each["order"], each["early"]) == (order, merges), each
        if merges:  # where a row is, and its number of parts; no state
            assert each["before"] == {"ld": 2, "st": 0}, each
    for each in said:  # K and V come by descriptions, with no load of theirs, or not at all
        assert bool(each["copied"]) is bool(each["scratch"]), each
        assert each["scratch"] <= 2 * DESCRIPTION_BYTES, each
    if not TIER:
        assert {each["cell"] for each in said if each["copied"]} == {COPIED}
        assert [each["buffered"] for each in said if each["cell"] == LOADED_AHEAD] == [
            2,
            2,
        ]  # K and V; with a trace too


# --- codecs


@pytest.mark.parametrize(
    ("codec", "dtype"),
    [
        ("int8", torch.int8),
        ("fp8_e4m3fn", torch.float8_e4m3fn),
        ("fp8_e4m3fnuz", torch.float8_e4m3fnuz),
        ("fp8_e5m2", torch.float8_e5m2),
    ],
)
def test_every_code_is_what_torch_reads_nan_and_infinity_too(made: Made, codec: str, dtype: torch.dtype) -> None:
    right = torch.arange(256, dtype=torch.uint8).view(dtype).float().numpy()
    number = ~np.isnan(right)
    for token in made[codec]:
        np.testing.assert_array_equal(token, right)
        np.testing.assert_array_equal(np.signbit(token[number]), np.signbit(right[number]))


@pytest.mark.parametrize(("high", "suffix"), [(False, ""), (True, "_high")])
def test_both_nibbles_of_every_byte_are_signed_the_first_one_first(made: Made, high: bool, suffix: str) -> None:
    signed = [*range(8), *range(-8, 0)]
    first, second = ([signed[byte >> shift & 15] for byte in range(256)] for shift in ((4, 0) if high else (0, 4)))
    along_dim = [value for pair in zip(first, second, strict=True) for value in pair]
    assert made[f"int4{suffix}"].tolist() == [along_dim, along_dim]
    assert made[f"int4_token{suffix}"].tolist() == [first, second]


def test_axes_that_share_a_scale_have_no_stride() -> None:
    assert shared_strides(torch.zeros(5, 1, 3, 1)) == (3, 0, 1, 0)
    assert shared_strides(torch.zeros(1, 1, 1, 1)) == (0, 0, 0, 0)
    assert shared_strides(torch.zeros(10, 4, 3, 8)[::2, :, :, ::2]) == (192, 24, 8, 2)


# --- terms


def test_casts_round_to_even_as_torch_does(made: Made) -> None:
    x = torch.from_numpy(made["x"])
    for kind, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        np.testing.assert_array_equal(made[kind], x.to(dtype).float().numpy())


@pytest.mark.parametrize("kind", ["relu", "sigmoid", "silu", "tanh"])
def test_functions_are_within_the_declared_error_and_keep_nan(made: Made, kind: str) -> None:
    x = torch.from_numpy(made["x"]).double()
    exact = {**vars(torch), "silu": torch.nn.functional.silu}[kind](x).numpy()
    scale = np.maximum(np.abs(exact), np.minimum(np.abs(x.numpy()), 1.0))
    finite = ~np.isnan(exact)
    assert (np.isnan(made[kind]) == ~finite).all()
    allowed = Adapter.capabilities.numerics_of(DType.FP32).u_function * scale[finite] + 2.0**-126
    assert (np.abs(made[kind][finite] - exact[finite]) <= allowed).all()


def test_low_bit_rounds_ties_to_even_codes_and_clips_both_ends(made: Made) -> None:
    codes = np.clip(np.rint(made["x"].astype(np.float64) / made_by.STEP), -made_by.LARGEST, made_by.LARGEST)
    np.testing.assert_array_equal(made["low_bit"], codes * made_by.STEP)


def test_a_gate_multiplies_element_by_element(made: Made) -> None:
    x = torch.from_numpy(made["x"])
    np.testing.assert_array_equal(made["gate"], (x * x).numpy())


def philox(counter: list[int], key: list[int]) -> int:
    """The first word of Philox4x32-10, in Python's integers."""
    for _ in range(10):
        a, b = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [(b >> 32) ^ counter[1] ^ key[0], b % 2**32, (a >> 32) ^ counter[3] ^ key[1], a % 2**32]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    return counter[0]


def test_dropout_draws_by_key_query_head_and_uid_under_all_64_bits_of_the_seed(made: Made) -> None:
    seed = [made_by.SEED % 2**32, made_by.SEED >> 32]
    for request, uid in enumerate(made_by.UIDS):
        right = [
            [philox([key, made_by.QUERY % 2**32, head, uid], seed) >= made_by.THRESHOLD for key in range(made_by.KEYS)]
            for head in range(made_by.HEADS)
        ]
        assert made[f"kept{request}"].astype(bool).tolist() == right
    words = dropout_words(Dropout(0.25, made_by.SEED, made_by.UIDS), 2)
    assert [word % 2**64 for word in words.tolist()] == [made_by.SEED, made_by.THRESHOLD, *made_by.UIDS]


@pytest.mark.parametrize("layout", RopeLayout)
@pytest.mark.parametrize("rotary_dim", [2, 12, 16])
def test_rope_multiplies_each_pair_by_a_complex_number(layout: RopeLayout, rotary_dim: int) -> None:
    rope, low, position = RoPE(rotary_dim, 100.0, layout), -3, 5
    first, second = paired_channels(rope, 17).tolist()
    assert sorted(c for c in first + second if c >= 0) == list(range(17))
    assert len(first) == 16 and second[8] == -1
    table = turns_of(rope, low, 9, torch.device("cpu"))
    assert table.shape == (13, 2, rotary_dim // 2) and table.dtype == torch.float32
    cosine, sine = table[position - low].double()
    for pair in range(rotary_dim // 2):
        half = (pair, pair + rotary_dim // 2) if layout is RopeLayout.HALF_SPLIT else (2 * pair, 2 * pair + 1)
        assert (first[pair], second[pair]) == half
        turn = np.exp(1j * position * 100.0 ** (-2 * pair / rotary_dim))
        assert abs(complex(cosine[pair], sine[pair]) - turn) < 2.0**-24


def test_the_table_of_rope_covers_every_position_that_turns() -> None:
    spec = spec_of(rope=RoPE(8), seq_lens=(10, 6), qo_lens=(2, 9))
    assert positions_of(spec) == (-3, 10)  # a query before its request's first key; an ordinal may be T
    assert turns_bytes(spec) == turns_of(RoPE(8), -3, 10, torch.device("cpu")).nbytes
    far = spec_of(rope=RoPE(8), seq_lens=(10,), qo_lens=(1,), causal=CausalRule.ABSOLUTE, query_positions=(1 << 30,))
    assert str(Adapter().support(far)) == "refused(rope at positions whose table exceeds 1073741824 bytes)"


@pytest.mark.parametrize("both", [False, True])
def test_the_bias_of_each_distance_is_that_of_its_bucket(both: bool) -> None:
    first = (0, 1, 1, 4, 9)
    bias = tuple(tuple(head + 0.25 * b for b in range(10 if both else 5)) for head in range(2))
    table = bias_by_distance(RelativeBuckets(first, bias, bidirectional=both))
    for distance in range(-9, 10):
        size = abs(distance) if both else max(distance, 0)
        bucket = max(b for b in range(5) if first[b] <= size) + (5 if both and distance < 0 else 0)
        assert table[:, distance + 9].tolist() == pytest.approx([LOG2E * head[bucket] for head in bias])


# --- lists


def case_of(spec: AttentionSpec, lists: list[list[int]]) -> Case:
    """A case of which only the lists matter."""
    none = torch.zeros(0)
    entries = torch.tensor([entry for entries in lists for entry in entries], dtype=torch.int32)
    indptr = torch.tensor(np.cumsum([0, *map(len, lists)]), dtype=torch.int32)
    table = torch.zeros(len(spec.seq_lens), 8, dtype=torch.int32)
    return Case(spec, Hints(), *[none] * 3, table, none, none, indptr, entries, none, none, none)


def spec_of(**fields: Any) -> AttentionSpec:
    given = {"seq_lens": (10, 6), "qo_lens": (2, 3), "block_size": 4, "causal": CausalRule.BOTTOM_RIGHT} | fields
    return AttentionSpec(
        num_qo_heads=2,
        num_kv_heads=2,
        head_dim_qk=16,
        head_dim_vo=16,
        page_size=4,
        dtype=DType.FP32,
        sm_scale=1.0,
        **given,
    )


def random_lists(spec: AttentionSpec, seed: int, *, repeats: bool) -> list[list[int]]:
    draw = np.random.default_rng(seed)
    lists = []
    for token in spec.token_request:
        blocks = -(-spec.seq_lens[token] // spec.block_size)
        for _ in range(spec.num_kv_heads):
            length = draw.integers(0, blocks + 1)
            named = draw.integers(0, blocks, 2 * length) if repeats else draw.permutation(blocks)[:length]
            lists.append([PADDING, *named.tolist(), PADDING])
    return lists


def rows_of(plan: Plan) -> list[list[int]]:
    return [part.tolist() for part in plan.kv_indices.split(plan.kv_indptr.diff().tolist())]


@pytest.mark.parametrize("block_size", [1, 4])
def test_ordinals_count_the_committed_tokens_that_the_list_names(block_size: int) -> None:
    spec = spec_of(candidate_kind=CandidateKind.SEQUENCE, block_size=block_size)
    for seed in range(20):
        lists = random_lists(spec, seed, repeats=False)
        plan = plan_of(case_of(spec, lists))
        assert plan.ordinals is not None and plan.query_ordinals is not None
        ordinals, queries = [], []
        for row, named in enumerate(lists):
            where = spec.row(row)
            seq_len, position = spec.seq_lens[where.request], spec.token_position[row // spec.num_kv_heads]
            tokens: list[int] = []
            for entry in named:
                if entry != PADDING:
                    ordinals.append(len(tokens))
                    tokens += range(entry * block_size, min((entry + 1) * block_size, seq_len))
            queries.append(len(tokens) - (tokens[-1:] == [position]))
        assert (plan.ordinals.tolist(), plan.query_ordinals.tolist()) == (ordinals, queries)
        assert rows_of(plan) == [[entry for entry in named if entry != PADDING] for named in lists]
    given = replace(spec, query_ordinals=tuple(range(spec.num_rows)))
    stated = plan_of(case_of(given, lists)).query_ordinals
    assert stated is not None and tuple(stated.tolist()) == given.query_ordinals


@pytest.mark.parametrize("rule", [EmptyRowRule.FORCE_SELF, EmptyRowRule.FORCE_SINK_TOKEN])
@pytest.mark.parametrize("window_left", [-1, 1])
@pytest.mark.parametrize("kind", CandidateKind)
def test_a_row_without_an_edge_holds_the_entry_of_its_token_alone(
    rule: EmptyRowRule, window_left: int, kind: CandidateKind
) -> None:
    spec = spec_of(empty_row=rule, window_left=window_left, candidate_kind=kind)
    forced_rows = 0
    for seed in range(10):
        lists = random_lists(spec, seed, repeats=kind is CandidateKind.MULTISET)
        plan = plan_of(case_of(spec, lists))
        assert plan.forced is not None
        for row, (named, planned) in enumerate(zip(lists, rows_of(plan), strict=True)):
            position = spec.token_position[row // 2]
            seen = [
                t
                for t in range(spec.seq_lens[spec.row(row).request])
                if t // 4 in named and t <= position and (window_left < 0 or t >= position - window_left)
            ]
            token = -1 if seen else position if rule is EmptyRowRule.FORCE_SELF else 0
            assert int(plan.forced[row]) == token
            forced_rows += token >= 0
            if token < 0:
                continue
            assert planned == [token // 4]
            at = int(plan.kv_indptr[row])
            if plan.ordinals is not None and plan.query_ordinals is not None:
                assert int(plan.ordinals[at]) + token % 4 == 0
                assert int(plan.query_ordinals[row]) == (token != position)
            if plan.log2_counts is not None:
                assert plan.log2_counts[at] == 0
    assert forced_rows > 10


def test_a_multiset_counts_its_repeats_and_its_normal_form_holds_them() -> None:
    spec = spec_of(candidate_kind=CandidateKind.MULTISET)
    case = case_of(spec, lists := random_lists(spec, 3, repeats=True))
    plan, normal = plan_of(case), Adapter().normalize(case)
    assert plan.log2_counts is not None
    for row, named in enumerate(lists):
        entries = sorted(entry for entry in named if entry != PADDING)
        part = slice(int(plan.kv_indptr[row]), int(plan.kv_indptr[row + 1]))
        assert plan.kv_indices[part].tolist() == sorted(set(entries))
        assert [2**x for x in plan.log2_counts[part].tolist()] == pytest.approx(
            [entries.count(e) for e in sorted(set(entries))]
        )
        assert normal.kv_indices[normal.kv_indptr[row] : normal.kv_indptr[row + 1]].tolist() == entries


def test_an_empty_row_that_is_forbidden_is_refused_by_name() -> None:
    spec = spec_of(empty_row=EmptyRowRule.FORBID)
    lists = [[0]] * spec.num_rows
    plan_of(case_of(spec, lists))
    lists[5] = [PADDING]
    with pytest.raises(Refused, match=r"row \(request 1, query 0, KV head 1\) has no edge"):
        plan_of(case_of(spec, lists))
