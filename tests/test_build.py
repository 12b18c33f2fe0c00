"""Cells become problems: pages, lists and values are what their axes say."""

from __future__ import annotations

import numpy as np
import pytest

from sacts.conformance import tensors
from sacts.conformance.build import Problem, build
from sacts.conformance.probes.inputs import COUNT, RANDOM
from sacts.matrices import tiers
from sacts.matrices.cell import parse
from sacts.reference.forward import edges
from sacts.reference.spec import DType

SMOKE = [cell.id for cell in tiers.load(tiers.path_of("smoke"))]


def problem(cell: str) -> Problem:
    return build(parse(cell))


def pages_of(found: Problem, request: int) -> list[int]:
    count = -(-found.spec.seq_lens[request] // found.spec.page_size)
    return found.table.table[request, :count].tolist()


@pytest.mark.parametrize("cell", SMOKE)
def test_stale_columns_lead_to_live_pages_of_others(cell: str) -> None:
    found = problem(cell)
    for request, owned in enumerate(found.table.owned):
        mine = pages_of(found, request)
        assert set(mine) == owned
        stale = set(found.table.table[request, len(mine) :].tolist())
        assert stale
        assert not stale & owned
        assert stale <= set(found.pages.tolist())


@pytest.mark.parametrize("cell", SMOKE)
def test_only_attended_slots_are_needed(cell: str) -> None:
    found = problem(cell)
    rows, t, _ = edges(found.spec, found.candidates)
    slots = set()
    for row, position in zip(rows.tolist(), t.tolist(), strict=True):
        request, _, head, _ = found.spec.row(row)
        page, offset = divmod(position, found.spec.page_size)
        slots.add((int(np.searchsorted(found.pages, found.table.table[request, page])), offset, head))
    assert slots == set(map(tuple, np.argwhere(found.needed).tolist()))


@pytest.mark.parametrize("cell", SMOKE)
def test_values_are_exact_in_the_dtype_and_finite(cell: str) -> None:
    found = problem(cell)
    for probe in (RANDOM, COUNT):
        q, k, v, _ = probe.inputs(found)
        for array in (q, k.data, v.data):
            assert np.isfinite(array).all()
            kept = tensors.to_numpy(tensors.to_torch(array, DType(found.cell.dtype), "cpu"))
            assert np.array_equal(kept, array)


def test_random_pages_are_unrelated_to_logical_order_and_leave_page_0_alone() -> None:
    pages = pages_of(problem("decode/fp16/kv:1600"), 0)
    assert len(set(pages)) == 100
    assert 0 not in pages
    assert abs(np.corrcoef(pages, range(100))[0, 1]) < 0.3


def test_identity_pages_ascend_over_the_requests() -> None:
    found = problem("decode/fp16/kv:60+20/map:identity")
    assert pages_of(found, 0) + pages_of(found, 1) == list(range(6))


def test_high_pages_overflow_32_bit_offsets() -> None:
    found = problem("decode/fp16/kv:70+30/map:high")
    page_elements = found.spec.page_size * found.spec.num_kv_heads * found.spec.head_dim_qk
    assert min(pages_of(found, 0)) * page_elements >= 2**31


def test_shared_pages_are_one_prefix_in_every_request() -> None:
    found = problem("decode/fp16/kv:100+70/map:shared")
    first, second = pages_of(found, 0), pages_of(found, 1)
    assert first[:2] == second[:2]
    assert not set(first[2:]) & set(second[2:])
    shared = np.searchsorted(found.pages, first[0])
    assert found.position_in(0)[shared].tolist() == found.position_in(1)[shared].tolist() == list(range(16))


def test_a_request_without_pages_shares_none() -> None:
    """Drawn by sacts fuzz: what stands in the columns of such a request is stale, and may be a page of another."""
    found = problem("decode/fp32/kv:0+40/page:1/map:shared")
    assert len(set(pages_of(found, 1))) == 40


def test_the_raw_lists_of_duplicates_repeat_and_pad_at_head_middle_and_tail() -> None:
    found = problem("decode/fp16/kv:90+50/pattern:duplicates")
    row = found.raw.indices[: found.raw.indptr[1]].tolist()
    assert row[0] == row[-1] == -1
    assert -1 in row[1:-1]
    assert found.candidates.duplicates > 0


def test_union_names_a_window_and_sinks_more_than_once() -> None:
    found = problem("decode/bf16/kv:80/pattern:union")
    entries = found.candidates.indices[: found.candidates.indptr[1]].tolist()
    assert set(range(64, 80)) | set(range(4)) <= set(entries)
    assert found.candidates.duplicates > 0


@pytest.mark.parametrize("length", [1, 48, 49, 64, 191])
def test_a_64k_list_of_few_pages_names_some_of_them_once(length: int) -> None:
    """Drawn by sacts fuzz: fewer pages than a tile has."""
    entries = problem(f"decode/fp16/kv:{length}/heads:2-1/block:16/pattern:case64k").raw.indices.tolist()
    assert entries
    assert sorted(set(entries)) == sorted(entries)
    assert {*entries} <= {*range(-(-length // 16))}


def test_the_example_names_no_token_that_its_query_cannot_see() -> None:
    """Drawn by sacts fuzz: the earlier of two queries sits at 126."""
    found = problem("prefill/fp16/kv:128/q:2/page:64/pattern:example/map:example/causal:bottom_right")
    lists = np.split(found.raw.indices, found.raw.indptr[1:-1])
    assert [each.tolist() for each in lists] == [[1, 2, 63, 64, 65]] * 2 + [[1, 2, 63, 64, 65, 127]] * 2


def test_the_64k_case_has_the_tiles_of_its_description() -> None:
    found = problem("decode/bf16/kv:65536/heads:4-1/block:16/pattern:case64k")
    pages = found.candidates.indices
    _, per_tile = np.unique(pages // 4, return_counts=True)
    assert len(pages) == 264
    assert np.bincount(per_tile).tolist() == [0, 40, 40, 0, 36]
    assert set(range(4080, 4096)) <= set(pages.tolist())


@pytest.mark.parametrize("hnd", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("strides", ["contiguous", "strided"])
def test_a_pool_holds_its_pages_in_every_form(hnd: bool, packed: bool, strides: str) -> None:
    rng = np.random.default_rng(0)
    k, v = np.round(rng.normal(size=(2, 3, 4, 2, 8)), 2)
    pages = np.array([1, 4, 6])
    form = tensors.CacheForm(hnd=hnd, packed=packed, strides=strides)
    pool = tensors.pool(k, v, pages, 7, DType.FP32, "cpu", form, filler=5.0)
    for cache, data in ((pool.k, k), (pool.v, v)):
        page = cache[pool.live].transpose(1, 2) if hnd else cache[pool.live]
        assert np.array_equal(tensors.to_numpy(page), data.astype(np.float32))
        assert cache.is_contiguous() == (strides == "contiguous" and not packed)
        assert cache.stride(-1) == 1
    assert (pool.packed is not None) == packed


def test_a_span_of_few_pages_overflows_32_bits() -> None:
    data = np.zeros((2, 4, 2, 8))
    pool = tensors.pool(data, data, np.array([0, 9]), 10, DType.FP16, "cpu", tensors.CacheForm(strides="span"), 0.0)
    assert 9 * pool.k.stride(0) > 2**31
    assert pool.k.stride()[1:] == (16, 8, 1)
