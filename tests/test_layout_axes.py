"""Axes of lists and pages: what a cell's lists, pages and codes are, and the mistakes that only such cells show."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from sacts.conformance.adapter import Backend, Case, Outputs
from sacts.conformance.build import Problem, build
from sacts.conformance.codes import edges
from sacts.conformance.judge import judge
from sacts.conformance.launch import Launcher
from sacts.conformance.probes.inputs import RANDOM
from sacts.kernels_under_test.emulation.adapter import Adapter
from sacts.matrices.cell import CellError, parse
from sacts.reference.formats import decode_table
from sacts.reference.spec import CodecFormat
from sacts.reports.records import Record, Verdict

ALIAS = "prefill/fp32/kv:60+50/q:3+2/pattern:all/map:alias"


def problem(cell: str) -> Problem:
    return build(parse(cell))


def judged(adapter: Any, cell: str) -> Record:
    return judge(Launcher(Backend(adapter), "cpu"), "x", parse(cell))


def lists(found: Problem) -> list[list[int]]:
    ends = zip(found.raw.indptr, found.raw.indptr[1:], strict=False)
    return [found.raw.indices[a:b].tolist() for a, b in ends]


# --- one page at two logical pages


def test_an_alias_is_one_page_at_two_logical_pages_and_each_request_owns_it() -> None:
    table = problem("decode/fp16/kv:80+50/map:alias").table
    places = {(n, page): int(table.table[n, page]) for n, count in ((0, 5), (1, 4)) for page in range(count)}
    shared = [page for page, times in Counter(places.values()).items() if times > 1]
    assert {places[1, 0], places[1, 2]} == set(shared)
    assert places[1, 0] == places[0, 1]
    assert places[1, 2] == places[0, 3]
    assert all(page in owned for page in shared for owned in table.owned)


def test_only_whole_pages_are_aliased() -> None:
    """A page that one request has filled in part would hold keys that the other has not."""
    found = problem("decode/fp16/kv:47+50/map:alias")
    assert int(found.table.table[1, 0]) == int(found.table.table[0, 1])
    assert int(found.table.table[1, 2]) not in found.table.table[0, :3].tolist()


@pytest.mark.parametrize("pos", ["rope", "alibi", "none"])
def test_keys_at_two_logical_positions_are_judged(pos: str) -> None:
    cell = ALIAS if pos == "none" else f"{ALIAS}/pos:{pos}"
    assert judged(Adapter(), cell).verdict is Verdict.PASS


def turned(k: torch.Tensor, by: int) -> torch.Tensor:
    """Keys [tokens, heads, d] turned `by` positions further: RoPE over all channels, half-split."""
    half = k.shape[-1] // 2
    angle = by * 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    a, b = k[..., :half].double(), k[..., half:].double()
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(k.dtype)


class WrittenRotated(Adapter):
    """Keys are turned by their place in the first request that owns the page, as if they were cached rotated."""

    def run(self, case: Case, plan: Any = None) -> Outputs:
        page_size, table = case.spec.page_size, case.page_table.clone()
        places = [(n, p) for n, t in enumerate(case.spec.seq_lens) for p in range(-(-t // page_size))]
        first = {int(table[place]): place[1] for place in reversed(places)}
        k, v = [case.k_cache], [case.v_cache]
        for place in places:
            page = int(table[place])
            if case.spec.rope and (by := (first[page] - place[1]) * page_size):
                table[place] = len(case.k_cache) + len(k) - 1
                k.append(turned(case.k_cache[page], by)[None])
                v.append(case.v_cache[page][None])
        return super().run(replace(case, k_cache=torch.cat(k), v_cache=torch.cat(v), page_table=table))


def test_keys_that_were_rotated_when_they_were_written_fail_at_the_other_place_alone() -> None:
    assert judged(WrittenRotated(), f"{ALIAS}/pos:rope").verdict is Verdict.FAIL
    assert judged(WrittenRotated(), ALIAS).verdict is Verdict.PASS
    assert judged(WrittenRotated(), f"{ALIAS.replace('alias', 'shared')}/pos:rope").verdict is Verdict.PASS


def test_gradients_of_an_aliased_page_are_those_of_both_places() -> None:
    cell = "train/fp32/kv:60+50/q:3+2/dim:32/pattern:all/map:alias/pos:rope"
    assert judged(Adapter(), cell).verdict is Verdict.PASS


# --- how long lists are, and who shares one


def test_lists_of_fixed_length_end_in_padding_and_mean_the_same() -> None:
    plain, fixed = problem("decode/fp16/kv:60+9"), problem("decode/fp16/kv:60+9/format:fixed_k")
    assert {len(row) for row in lists(fixed)} == {max(map(len, lists(fixed)))}
    assert any(row[-1] == -1 for row in lists(fixed))
    assert all(row[: row.index(-1)].count(-1) == 0 for row in lists(fixed) if -1 in row), "behind the entries only"
    assert [len(row) - row.count(-1) for row in lists(fixed)] == [len(row) for row in lists(plain)]
    assert np.diff(fixed.candidates.indptr).tolist() == [len(row) for row in lists(plain)]


def test_each_list_in_tiers_has_the_least_capacity_that_holds_it() -> None:
    found = problem("decode/fp16/kv:250+100+20+0/pattern:all/format:tiers")
    assert [len(row) for row in lists(found)] == [256, 256, 256, 256, 64, 64, 16, 16]


def test_a_sentinel_of_a_fixed_list_that_is_read_as_a_token_fails() -> None:
    """Padding by repeating a real entry doubles its mass: here each sentinel becomes the row's first entry."""

    class Repeats(Adapter):
        def run(self, case: Case, plan: Any = None) -> Outputs:
            starts = case.kv_indptr[:-1].long().repeat_interleave(case.kv_indptr.diff())
            real = torch.where(case.kv_indices < 0, case.kv_indices[starts], case.kv_indices)
            return super().run(replace(case, kv_indices=real))

    from sacts.conformance.adapter import Consumes

    repeats = Repeats()
    repeats.capabilities = replace(repeats.capabilities, consumes=Consumes.RAW)
    cell = "decode/fp16/kv:60+9/kind:multiset"
    assert judged(repeats, cell).verdict is Verdict.PASS
    assert judged(repeats, f"{cell}/format:fixed_k").verdict is Verdict.FAIL


@pytest.mark.parametrize("block", ["", "/block:16"])
def test_queries_of_a_block_share_one_list_and_others_do_not(block: str) -> None:
    found = problem(f"prefill/fp16/kv:200+150/q:6+5{block}/causal:bottom_right/qblock:4")
    rows = lists(found)
    of = [rows[2 * token : 2 * token + 2] for token in range(11)]
    assert of[0] == of[1] == of[2] == of[3]
    assert of[4] == of[5]
    assert of[6] == of[9]
    assert len({str(each) for each in of}) == 4


def test_a_shared_list_that_serves_the_next_block_too_fails() -> None:
    class Wide(Adapter):
        def run(self, case: Case, plan: Any = None) -> Outputs:
            if case.spec.num_tokens < 5:
                return super().run(case)
            rows = [case.kv_indices[a:b] for a, b in zip(case.kv_indptr, case.kv_indptr[1:], strict=False)]
            heads = case.spec.num_kv_heads
            rows = [rows[(row // heads) // 8 * 8 * heads + row % heads] for row in range(len(rows))]
            indptr = torch.tensor([0, *map(len, rows)]).cumsum(0).to(case.kv_indptr.dtype)
            return super().run(replace(case, kv_indptr=indptr, kv_indices=torch.cat(rows)))

    assert judged(Wide(), "prefill/fp16/kv:90/q:8/qblock:4").verdict is Verdict.FAIL
    assert judged(Wide(), "prefill/fp16/kv:90/q:8/qblock:8").verdict is Verdict.PASS


# --- edges of codes


@pytest.mark.parametrize("stored", [f for f in CodecFormat if f is not CodecFormat.FP8_E4M3FNUZ])
def test_edges_are_numbers_of_the_format_and_one_beyond(stored: CodecFormat) -> None:
    numbers = decode_table(stored)
    numbers = numbers[np.isfinite(numbers)]
    inside = edges(stored)[np.abs(edges(stored)) <= np.abs(numbers).max()]
    largest = -numbers.min() if stored.integer else numbers.max()
    assert set(inside) - {largest} <= set(numbers)
    assert np.abs(edges(stored)).max() == 2 * largest
    assert np.sort(np.abs(numbers[numbers != 0]))[0] in inside


def test_codes_at_their_edges_are_drawn_and_judged() -> None:
    cell = "decode/bf16/kv:60+50/pattern:all/values:scale_edges/kcodec:fp8_e4m3fn/vcodec:int8"
    found = problem(cell)
    assert found.k_scales is not None
    assert found.v_scales is not None
    inputs = RANDOM.inputs(found)
    codes = found.k_scales.codes(inputs.k.data, found.needed)[found.needed]
    share = np.isin(codes & 0x7F, (0x00, 0x01, 0x07, 0x08, 0x7E)).mean()
    assert 0.2 < share < 0.4
    assert (found.v_scales.codes(inputs.v.data, found.needed) == 0x80).any(), "-128"
    record = judged(Adapter(), cell)
    assert record.verdict is Verdict.PASS
    assert record.use["out"] < 1


@pytest.mark.parametrize(
    ("wrong", "cell"),
    [
        (0x80, "decode/bf16/kv:60+50/pattern:all/vcodec:int8"),
        (0x7E, "decode/bf16/kv:60+50/pattern:all/vcodec:fp8_e4m3fn"),
        (0x07, "decode/fp32/kv:60+50/pattern:all/vcodec:fp8_e4m3fn"),
    ],
)
def test_a_code_at_an_edge_that_is_read_wrongly_fails(wrong: int, cell: str) -> None:
    """-128 read as 127, 448 as NaN's neighbour 416, the largest subnormal flushed."""
    instead = {0x80: 0x7F, 0x7E: 0x7D, 0x07: 0x00}[wrong]

    class Reads(Adapter):
        def run(self, case: Case, plan: Any = None) -> Outputs:
            bits = case.v_cache.view(torch.uint8)
            read = torch.where(bits == wrong, torch.full_like(bits, instead), bits).view(case.v_cache.dtype)
            return super().run(replace(case, v_cache=read))

    assert judged(Reads(), cell.replace("/vcodec", "/values:scale_edges/vcodec")).verdict is Verdict.FAIL


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        ("decode/fp16/kv:60+9/map:alias", "two whole pages of the first request and one of another"),
        ("decode/fp16/kv:90/map:alias", "two whole pages"),
        ("decode/fp16/kv:9/values:scale_edges", "only codes have edges"),
        ("decode/fp16/kv:9/qblock:4", "one query a request"),
        ("decode/fp16/kv:9/qtile:4", "one query a request"),
        ("decode/fp16/kv:9/reduction:hybrid", "only phase train sums gradients"),
    ],
)
def test_what_means_nothing_is_answered_with_the_reason(cell: str, words: str) -> None:
    with pytest.raises(CellError, match=words):
        parse(cell)
