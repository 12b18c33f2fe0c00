"""Paging: addresses against NumPy's own views, ownership, shared prefixes, copy-on-write, aliases, generations."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sacts.reference.candidates import CandidateError, CandidateLists, Severity, validate
from sacts.reference.forward import Inputs, forward
from sacts.reference.paging import (
    CACHE_AXES,
    HND,
    NHD,
    PACKED_HND,
    PACKED_NHD,
    PagedCache,
    PageTable,
    cache_view,
    copy_on_write,
    share_prefix,
)
from sacts.reference.spec import AttentionSpec, CandidateKind, Dropout, DType, RoPE

SPEC = AttentionSpec(
    num_qo_heads=2,
    num_kv_heads=1,
    head_dim_qk=4,
    head_dim_vo=3,
    page_size=4,
    seq_lens=(10, 6),
    qo_lens=(1, 1),
    dtype=DType.FP32,
    sm_scale=0.7,
)
# Request 0: pages 5, 2, 7 (its last column stale); request 1: pages 1, 3 (stale columns name pages of request 0).
TABLE = PageTable(
    np.array([[5, 2, 7, 99], [1, 3, 5, 2]]),
    page_size=4,
    num_pages=9,
    owned=(frozenset({5, 2, 7}), frozenset({1, 3})),
)
GENERATIONS = replace(
    TABLE, generations=np.array([[4, 0, 1, 9], [2, 2, 9, 9]]), pool_generations=np.array([0, 2, 0, 2, 0, 4, 0, 1, 6])
)


def lists(*rows: list[int]) -> CandidateLists:
    return CandidateLists(np.cumsum([0, *map(len, rows)]), np.array([x for row in rows for x in row], np.int64))


def cache(seed: int, dim: int, pages: int = 9) -> PagedCache:
    return PagedCache(np.arange(pages), np.random.default_rng(seed).normal(size=(pages, 4, 1, dim)))


def inputs(spec: AttentionSpec = SPEC) -> Inputs:
    q = np.random.default_rng(0).normal(size=(spec.num_tokens, spec.num_qo_heads, spec.head_dim_qk))
    return Inputs(q, cache(1, spec.head_dim_qk), cache(2, spec.head_dim_vo))


# --- equation (17) against NumPy indexing


@st.composite
def allocations(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[str, ...], dict[str, int | slice]]:
    axes = draw(st.one_of(st.sampled_from((NHD, HND, PACKED_NHD, PACKED_HND)), st.permutations((*NHD, "layer"))))
    shape = tuple(draw(st.integers(1, 5)) for _ in axes)
    at: dict[str, int | slice] = {}
    for name, size in zip(axes, shape, strict=True):
        if name not in CACHE_AXES:
            at[name] = draw(st.integers(0, size - 1))
        elif draw(st.booleans()):
            at[name] = slice(draw(st.integers(0, size - 1)), None, draw(st.integers(1, 2)))
    return shape, tuple(axes), at


@settings(max_examples=200, deadline=None, derandomize=True)
@given(allocations(), st.sampled_from((0, 1, 13)))
def test_every_address_is_where_numpy_finds_the_element(
    allocation: tuple[tuple[int, ...], tuple[str, ...], dict[str, int | slice]], base: int
) -> None:
    shape, axes, at = allocation
    view = cache_view(shape, axes, at, base=base)
    elements = base + np.arange(np.prod(shape)).reshape(shape)
    kept = [name for name in axes if name in CACHE_AXES]
    elements = elements[tuple(at.get(name, slice(None)) for name in axes)]
    elements = elements.transpose([kept.index(name) for name in CACHE_AXES])
    assert view.shape == elements.shape
    page, token, head = np.indices(view.shape[:3])
    found = view.address(page, token, head)[..., None] + np.arange(view.shape[3]) * view.dim_stride
    assert (found == elements).all()


def test_packed_v_lies_one_page_behind_packed_k() -> None:
    k, v = (cache_view((6, 2, 16, 8, 128), PACKED_NHD, {"kv": which}) for which in (0, 1))
    assert k.strides == v.strides == (2 * 16 * 8 * 128, 8 * 128, 128)
    assert int(v.address(3, 5, 2)) - int(k.address(3, 5, 2)) == 16 * 8 * 128


def test_addresses_beyond_31_bits_do_not_wrap() -> None:
    view = cache_view((40_001, 64, 8, 128), NHD, base=1)
    found = view.address(np.array([40_000], np.int32), np.array([63], np.int32), np.array([7], np.int32))
    assert found.tolist() == [1 + 40_000 * 65_536 + 63 * 1024 + 7 * 128]


@pytest.mark.parametrize(("at", "words"), [((9, 0, 0), "page 9"), ((0, -1, 0), "token -1"), ((0, 0, 2), "head 2")])
def test_a_coordinate_outside_the_cache_is_named(at: tuple[int, int, int], words: str) -> None:
    with pytest.raises(IndexError, match=words):
        cache_view((9, 4, 2, 8), NHD).address(*at)


@pytest.mark.parametrize(
    ("shape", "axes", "at", "words"),
    [
        ((2, 3), NHD, {}, "one distinct axis name per size"),
        ((2, 3, 4, 5), ("page", "token", "head", "head"), {}, "one distinct axis name per size"),
        ((2, 3, 4, 5), NHD, {"kv": 0}, "no axis 'kv'"),
        ((2, 2, 3, 4, 5), PACKED_NHD, {}, "'kv' needs an index"),
        ((2, 2, 3, 4, 5), PACKED_NHD, {"kv": 2}, "'kv' has 2 entries, got the index 2"),
        ((2, 3, 4, 5), NHD, {"head": slice(None, None, -1)}, "'head' needs a positive step"),
        ((2, 3, 4, 5), NHD, {"head": 1}, "'head' must stay an axis"),
        ((2, 3, 4), NHD[:3], {}, "needs an axis 'dim'"),
    ],
)
def test_a_view_that_is_none_is_refused(
    shape: tuple[int, ...], axes: tuple[str, ...], at: dict[str, int | slice], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        cache_view(shape, axes, at)


# --- ownership and generations


def test_ownership_is_by_request_and_nothing_outside_the_pool_is_owned() -> None:
    table = replace(TABLE, owned=(frozenset({5, 2, 7, -9, 9}), frozenset({1, 3})))
    assert table.owns(0, [5, 2, 7, 1, 9, -9, 10]).tolist() == [True, True, True, False, False, False, False]
    assert table.owns([1, 1, 1], [1, 3, 0]).tolist() == [True, True, False]


def test_a_page_that_was_handed_out_again_is_stale_where_an_entry_needs_it() -> None:
    validate(SPEC, lists([0, 9], [0, 5]), GENERATIONS)
    assert GENERATIONS.pool_generations is not None
    later = GENERATIONS.pool_generations.copy()
    later[2] += 1
    table = replace(GENERATIONS, pool_generations=later)
    validate(SPEC, lists([0, 9], [0, 5]), table)
    with pytest.raises(CandidateError) as caught:
        validate(SPEC, lists([0, 9, 6], [0, 5]), table)
    (found,) = caught.value.entries
    assert found[:4] == (Severity.STALE_GENERATION, SPEC.row(0), 2, 6)
    assert "physical page 2" in str(caught.value)


def test_a_recycled_page_of_another_request_has_one_name_the_worst() -> None:
    table = replace(GENERATIONS, owned=(frozenset({5, 7}), frozenset({1, 2, 3})), pool_generations=np.arange(9))
    with pytest.raises(CandidateError) as caught:
        validate(SPEC, lists([6], []), table)
    assert [e.severity for e in caught.value.entries] == [Severity.STALE_GENERATION]


def test_stale_columns_are_never_looked_at() -> None:
    validate(SPEC, lists(list(range(10)), list(range(6))), GENERATIONS)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"generations": np.zeros((2, 4))}, "together"),
        ({"generations": np.zeros((2, 3)), "pool_generations": np.zeros(9)}, r"generations must have shape \(2, 4\)"),
        ({"generations": np.zeros((2, 4)), "pool_generations": np.zeros(8)}, r"must have shape \(9,\)"),
    ],
)
def test_generations_of_the_wrong_shape_are_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replace(TABLE, **changes)  # type: ignore[arg-type]


# --- shared prefixes, aliases, copy-on-write


def test_a_shared_prefix_has_two_owners_and_reads_the_same_keys() -> None:
    shared = share_prefix(TABLE, 0, 1, 1)
    assert shared.table[:, 0].tolist() == [5, 5]
    assert shared.owned == (frozenset({5, 2, 7}), frozenset({1, 3, 5}))
    assert shared.references(SPEC.seq_lens, 5) == ((0, 0), (1, 0))
    assert TABLE.table[1, 0] == 1
    values = inputs()
    rows = validate(SPEC, lists([0, 2, 3], [0, 2, 3]), shared)
    same_query = values._replace(q=np.repeat(values.q[:1], 2, axis=0))
    out, lse = forward(SPEC, same_query, shared, rows)
    assert (out[0] == out[1]).all()
    assert (lse[0] == lse[1]).all()


def test_a_page_that_the_source_does_not_own_cannot_be_shared() -> None:
    with pytest.raises(ValueError, match="request 0 does not own physical page 99"):
        share_prefix(TABLE, 0, 1, 4)
    with pytest.raises(ValueError, match="5 pages does not fit a table of 4 columns"):
        share_prefix(TABLE, 0, 1, 5)


def test_an_alias_at_another_logical_page_is_a_key_of_its_own() -> None:
    """Deduplication by physical page would attend the page once."""
    aliased = replace(TABLE, table=np.array([[5, 2, 5, 99], [1, 3, 5, 2]]))
    assert aliased.references(SPEC.seq_lens, 5) == ((0, 0), (0, 2))
    values = inputs()
    copied = TABLE
    pages = values.k.with_copy(5, 7), values.v.with_copy(5, 7)
    raw = lists([0, 1, 8, 9], [2])
    found = forward(SPEC, values, aliased, validate(SPEC, raw, aliased))
    expected = forward(SPEC, Inputs(values.q, *pages), copied, validate(SPEC, raw, copied))
    once = forward(SPEC, values, aliased, validate(SPEC, lists([0, 1], [2]), aliased))
    assert (found.out == expected.out).all()
    assert (found.lse == expected.lse).all()
    np.testing.assert_allclose(found.lse[0], once.lse[0] + np.log(2), rtol=1e-14)


physical_pages = st.lists(st.integers(0, 3), min_size=3, max_size=3)
TERMS = (
    SPEC,
    replace(SPEC, rope=RoPE(4), alibi_slopes=(0.5, 0.1), dropout=Dropout(0.3, 5)),
    replace(SPEC, rope=RoPE(4), candidate_kind=CandidateKind.MULTISET),
    replace(SPEC, rope=RoPE(4), candidate_kind=CandidateKind.SEQUENCE),
)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(physical_pages, physical_pages, st.sampled_from(TERMS), st.data())
def test_whatever_pages_share_storage_the_result_is_that_of_private_copies(
    first: list[int], second: list[int], spec: AttentionSpec, data: st.DataObject
) -> None:
    """Aliases within a request and between two; a copy of each reference, where no page is used twice, decides."""
    rows = [
        data.draw(st.lists(st.integers(0, t - 1), unique=spec.candidate_kind is not CandidateKind.MULTISET))
        for t in spec.seq_lens
    ]
    aliased = PageTable(np.array([first, second]), 4, 4, (frozenset(first), frozenset(second)))
    private = PageTable(np.arange(6).reshape(2, 3), 4, 6, (frozenset(range(3)), frozenset(range(3, 6))))
    values = inputs(spec)
    shared = Inputs(values.q, *(PagedCache(np.arange(4), each.data[:4]) for each in (values.k, values.v)))
    copies = Inputs(values.q, *(PagedCache(np.arange(6), each.data[first + second]) for each in (values.k, values.v)))
    for found, expected in zip(
        forward(spec, shared, aliased, validate(spec, lists(*rows), aliased)),
        forward(spec, copies, private, validate(spec, lists(*rows), private)),
        strict=True,
    ):
        assert (found == expected).all()


def test_a_write_to_a_shared_page_goes_to_a_copy_and_the_other_request_sees_nothing() -> None:
    shared = share_prefix(GENERATIONS, 0, 1, 1)
    private = copy_on_write(shared, SPEC.seq_lens, 1, 0)
    assert (private.source, private.destination) == (5, 0)
    after = private.table
    assert after.table[:, 0].tolist() == [5, 0]
    assert after.owned == (frozenset({5, 2, 7}), frozenset({0, 1, 3}))
    assert shared.table[:, 0].tolist() == [5, 5]
    values, raw = inputs(), lists(list(range(10)), list(range(6)))
    before = forward(SPEC, values, shared, validate(SPEC, raw, shared))
    copies = Inputs(values.q, *(each.with_copy(5, 0) for each in (values.k, values.v)))
    unchanged = forward(SPEC, copies, after, validate(SPEC, raw, after))
    assert (unchanged.out == before.out).all()
    copies.v.data[0] += 1.0
    written = forward(SPEC, copies, after, validate(SPEC, raw, after))
    assert (written.out[0] == before.out[0]).all()
    assert (written.out[1] != before.out[1]).all()


def test_a_copied_page_is_a_new_generation_for_whoever_still_holds_it() -> None:
    old = replace(GENERATIONS, table=GENERATIONS.table.copy(), owned=(frozenset({5, 2, 7}), frozenset({1, 3, 5})))
    old.table[1, 0] = 5
    fresh = copy_on_write(old, SPEC.seq_lens, 1, 0).table
    assert fresh.pool_generations is not None
    assert fresh.generations is not None
    assert fresh.pool_generations.tolist() == [1, 2, 0, 2, 0, 4, 0, 1, 6]
    assert fresh.generations[1, 0] == 1
    holder = replace(old, table=np.array([[5, 2, 7, 99], [0, 3, 5, 2]]), generations=np.zeros((2, 4), np.int64))
    assert not holder.is_stale(1, 0)
    assert replace(holder, pool_generations=fresh.pool_generations).is_stale(1, 0)


def test_an_alias_within_one_request_is_copied_too_and_keeps_its_other_reference() -> None:
    aliased = replace(TABLE, table=np.array([[5, 2, 5, 99], [1, 3, 5, 2]]))
    private = copy_on_write(aliased, SPEC.seq_lens, 0, 2)
    assert private.table.table[0].tolist() == [5, 2, 0, 99]
    assert private.table.owned[0] == frozenset({0, 5, 2, 7})


def test_a_page_that_another_request_owns_without_using_it_yet_is_copied() -> None:
    promised = replace(TABLE, owned=(TABLE.owned[0], TABLE.owned[1] | {2}))
    private = copy_on_write(promised, SPEC.seq_lens, 0, 1)
    assert (private.source, private.destination) == (2, 0)
    assert private.table.owned == (frozenset({5, 0, 7}), frozenset({1, 2, 3}))


def test_a_private_page_is_not_copied() -> None:
    private = copy_on_write(TABLE, SPEC.seq_lens, 0, 1)
    assert private == (TABLE, 2, 2)


def test_a_full_pool_and_an_uncommitted_page_are_refused() -> None:
    shared = share_prefix(TABLE, 0, 1, 1)
    full = replace(shared, owned=(shared.owned[0] | {0, 4, 6, 8}, shared.owned[1]))
    with pytest.raises(MemoryError, match="request 1, logical page 0: all 9 pages"):
        copy_on_write(full, SPEC.seq_lens, 1, 0)
    with pytest.raises(ValueError, match=r"request 1 has no committed logical page 2 \(T = 6\)"):
        copy_on_write(shared, SPEC.seq_lens, 1, 2)


# --- relabelling


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.permutations(range(9)))
def test_relabelling_physical_pages_changes_no_bit(relabel: list[int]) -> None:
    new = np.array(relabel)
    values, raw = inputs(), lists([9, 0, 4, 5], [5, 1])
    table = replace(
        TABLE,
        table=np.where(TABLE.table < 9, new[np.minimum(TABLE.table, 8)], 99),
        owned=tuple(frozenset(new[sorted(pages)].tolist()) for pages in TABLE.owned),
    )
    moved = Inputs(values.q, *(PagedCache(np.arange(9), each.data[np.argsort(new)]) for each in (values.k, values.v)))
    for found, expected in zip(
        forward(SPEC, moved, table, validate(SPEC, raw, table)),
        forward(SPEC, values, TABLE, validate(SPEC, raw, TABLE)),
        strict=True,
    ):
        assert (found == expected).all()


def test_a_page_without_data_is_named() -> None:
    sparse = PagedCache(np.array([2, 5]), np.arange(2 * 4 * 1 * 3, dtype=float).reshape(2, 4, 1, 3))
    assert (sparse.read(TABLE, 0, [6, 1]) == sparse.data[[0, 1], [2, 1]]).all()
    for empty in (sparse, PagedCache(np.zeros(0, np.int64), np.zeros((0, 4, 1, 3)))):
        with pytest.raises(LookupError, match="request 0, position 8: physical page 7 holds no data"):
            empty.read(TABLE, 0, [8])
    with pytest.raises(LookupError, match="physical page 7 holds no data"):
        sparse.with_copy(7, 0)
