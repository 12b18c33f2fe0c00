"""`validate`: what each illegal entry is called, and N(D, W, A, T) against brute force over Python sets."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sacts.reference.candidates import CandidateError, CandidateLists, Severity, expand, normalize, validate
from sacts.reference.forward import edges
from sacts.reference.paging import PageTable
from sacts.reference.spec import AttentionSpec, CandidateKind, CausalRule, DType, Row

Lists = list[list[int]]

# Two requests, two queries each, two KV heads: row 7 is (request 1, query 1, KV head 1).
SPEC = AttentionSpec(
    num_qo_heads=4,
    num_kv_heads=2,
    head_dim_qk=4,
    head_dim_vo=4,
    page_size=16,
    seq_lens=(40, 21),
    qo_lens=(2, 2),
    dtype=DType.FP32,
    sm_scale=1.0,
)
CAUSAL = replace(SPEC, causal=CausalRule.BOTTOM_RIGHT)
SEQUENCE = replace(SPEC, candidate_kind=CandidateKind.SEQUENCE)


def csr(rows: Lists) -> CandidateLists:
    return CandidateLists(np.cumsum([0, *map(len, rows)]), np.array([x for row in rows for x in row], np.int64))


def rows_with(row: int, entries: list[int], rows: int = SPEC.num_rows) -> CandidateLists:
    """Legal single entries everywhere, `entries` in one row."""
    return csr([entries if i == row else [0] for i in range(rows)])


def table_of(spec: AttentionSpec) -> PageTable:
    """Distinct pages in descending order; one stale column beyond the longest request."""
    counts = [-(-t // spec.page_size) for t in spec.seq_lens]
    table = np.full((len(counts), max(counts, default=0) + 1), 10**6)
    owned, next_page = [], sum(counts)
    for request, count in enumerate(counts):
        table[request, :count] = np.arange(next_page, next_page - count, -1)
        owned.append(frozenset(table[request, :count].tolist()))
        next_page -= count
    return PageTable(table, spec.page_size, sum(counts) + 2, tuple(owned))


def with_page(table: PageTable, request: int, page: int, physical: int) -> PageTable:
    changed = table.table.copy()
    changed[request, page] = physical
    return replace(table, table=changed)


TABLE = table_of(SPEC)


def rejected(
    spec: AttentionSpec, raw: CandidateLists, table: PageTable, sentinels: tuple[int, ...] = ()
) -> CandidateError:
    with pytest.raises(CandidateError) as caught:
        validate(spec, raw, table, sentinels=sentinels)
    return caught.value


@pytest.mark.parametrize(
    ("spec", "row", "entries", "severity", "entry", "reason"),
    [
        (SPEC, 7, [4, 0, -3], Severity.OUT_OF_RANGE, 2, "negative"),
        (SPEC, 7, [3, 21], Severity.UNCOMMITTED, 1, "T = 21"),
        (SPEC, 7, [3, 10**9, 4], Severity.UNCOMMITTED, 1, "T = 21"),
        (CAUSAL, 5, [19, 4, 20], Severity.ACAUSAL, 2, "position 19"),
        (SEQUENCE, 6, [5, 9, 5], Severity.DUPLICATE, 2, "repeats"),
    ],
)
def test_an_illegal_entry_is_named_by_request_row_entry_and_value(
    spec: AttentionSpec, row: int, entries: list[int], severity: Severity, entry: int, reason: str
) -> None:
    error = rejected(spec, rows_with(row, entries), TABLE)
    (found,) = error.entries
    assert found[:4] == (severity, spec.row(row), entry, entries[entry])
    assert reason in found.reason
    request, query, kv_head, _ = spec.row(row)
    assert request == 1
    for words in (f"request {request}", f"query {query}", f"KV head {kv_head}", f"entry {entry}", str(entries[entry])):
        assert words in str(error)
    assert severity.name.lower() in str(error)


@pytest.mark.parametrize(
    ("physical", "severity", "reason"),
    [
        (TABLE.num_pages, Severity.OUT_OF_RANGE, f"outside the pool of {TABLE.num_pages}"),
        (-1, Severity.OUT_OF_RANGE, "outside the pool"),
        (int(TABLE.table[0, 0]), Severity.FOREIGN, "which the request does not own"),
    ],
)
def test_a_page_that_must_not_be_read_is_named_where_an_entry_needs_it(
    physical: int, severity: Severity, reason: str
) -> None:
    table = with_page(TABLE, 1, 1, physical)
    error = rejected(SPEC, rows_with(7, [2, 18, 3, 20]), table)
    assert [e[:4] for e in error.entries] == [(severity, Row(1, 1, 1), 1, 18), (severity, Row(1, 1, 1), 3, 20)]
    assert "logical page 1" in str(error)
    assert f"physical page {physical}" in str(error)
    assert reason in str(error)
    assert "(and 1 more)" in str(error)
    validate(SPEC, rows_with(7, [2, 15, 3]), table)


@pytest.mark.parametrize("seq_len", [5, 40])
def test_a_request_whose_pages_are_all_foreign_is_rejected_by_entry(seq_len: int) -> None:
    spec = replace(SPEC, seq_lens=(40, seq_len))
    table = replace(table_of(spec), owned=(table_of(spec).owned[0], frozenset()))
    error = rejected(spec, csr([[], [], [], [], [], [], [], [3]]), table)
    assert [e[:4] for e in error.entries] == [(Severity.FOREIGN, Row(1, 1, 1), 0, 3)]


def test_a_page_beyond_the_columns_of_the_table_is_named() -> None:
    error = rejected(SPEC, rows_with(2, [4, 33]), replace(TABLE, table=TABLE.table[:, :2]))
    assert [e[:4] for e in error.entries] == [(Severity.OUT_OF_RANGE, Row(0, 1, 0), 1, 33)]
    assert "logical page 2" in str(error)


def test_a_block_needs_every_committed_page_that_it_covers_and_no_stale_one() -> None:
    spec = replace(SPEC, block_size=32)
    validate(spec, rows_with(1, [0, 1]), TABLE)
    error = rejected(spec, rows_with(1, [1, 0]), with_page(TABLE, 0, 1, int(TABLE.table[1, 0])))
    assert {(e.severity, e.value) for e in error.entries} == {(Severity.FOREIGN, 0)}
    assert error.entries[1][1:3] == (Row(0, 0, 1), 1)


def test_a_causal_token_list_rejects_what_a_causal_block_list_masks() -> None:
    rejected(CAUSAL, rows_with(4, [20]), TABLE)
    spec = replace(CAUSAL, block_size=4)
    validated = validate(spec, rows_with(4, [5]), TABLE)
    row, t, _ = expand(spec, validated)
    assert t[row == 4].tolist() == [20]
    row, t, _ = edges(spec, validated)
    assert t[row == 4].tolist() == []
    row, t, _ = edges(spec, validate(spec, rows_with(6, [5]), TABLE))
    assert t[row == 6].tolist() == [20]


def test_a_block_id_whose_first_token_exceeds_64_bits_is_uncommitted() -> None:
    error = rejected(replace(SPEC, block_size=16), rows_with(7, [0, 2**60]), TABLE)
    assert [e[:4] for e in error.entries] == [(Severity.UNCOMMITTED, Row(1, 1, 1), 1, 2**60)]


def test_a_negative_entry_is_negative_only_even_where_the_query_position_is_negative() -> None:
    spec = replace(CAUSAL, seq_lens=(40, 3), qo_lens=(0, 6))
    error = rejected(spec, csr([[-2], *[[]] * (spec.num_rows - 1)]), table_of(spec))
    assert [e[:4] for e in error.entries] == [(Severity.OUT_OF_RANGE, Row(1, 0, 0), 0, -2)]


def test_all_illegal_entries_are_listed_worst_first() -> None:
    raw = csr([[1, 39], [-1], [0], [40], [0], [21, 5], [0], [0]])
    error = rejected(CAUSAL, raw, TABLE)
    assert [e[:4] for e in error.entries] == [
        (Severity.UNCOMMITTED, Row(0, 1, 1), 0, 40),
        (Severity.UNCOMMITTED, Row(1, 0, 1), 0, 21),
        (Severity.OUT_OF_RANGE, Row(0, 0, 1), 0, -1),
        (Severity.ACAUSAL, Row(0, 0, 0), 1, 39),
    ]
    assert str(error).startswith("uncommitted: ")
    assert str(error).endswith("(and 3 more)")


@pytest.mark.parametrize(
    ("indptr", "indices", "words"),
    [
        ([0, 1], [0], "9 entries"),
        ([0] * 10, [], "9 entries"),
        ([1, 1, 1, 1, 1, 1, 1, 1, 1], [3], "the ends"),
        ([0, 0, 0, 0, 0, 0, 0, 0, 2], [3], "the ends"),
        ([0, 1, 3, 2, 2, 2, 2, 2, 2], [3, 4], "at 2"),
    ],
)
def test_a_csr_that_is_none_is_refused(indptr: list[int], indices: list[int], words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        validate(SPEC, CandidateLists(np.array(indptr), np.array(indices, np.int64)), TABLE)
    assert not isinstance(caught.value, CandidateError)


def test_only_declared_sentinels_are_padding() -> None:
    raw = rows_with(7, [-1, 6, -1, 2, 2**31 - 1])
    validated = validate(SPEC, raw, TABLE, sentinels=(-1, 2**31 - 1))
    assert validated.indptr.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 9]
    assert validated.indices[7:].tolist() == [2, 6]
    assert validated.duplicates == 0
    assert {e.value for e in rejected(SPEC, raw, TABLE, (-1,)).entries} == {2**31 - 1}
    assert [e.entry for e in rejected(SPEC, raw, TABLE, (2**31 - 1,)).entries] == [0, 2]


def test_padding_keeps_the_entry_numbers_of_the_raw_list() -> None:
    error = rejected(SPEC, rows_with(7, [-1, -1, 3, -1, 21]), TABLE, (-1,))
    assert [e.entry for e in error.entries] == [4]


def test_a_sequence_keeps_its_order_and_a_set_does_not() -> None:
    raw = rows_with(3, [9, 2, 30, 4])
    assert validate(SEQUENCE, raw, TABLE).indices[3:7].tolist() == [9, 2, 30, 4]
    assert validate(SPEC, raw, TABLE).indices[3:7].tolist() == [2, 4, 9, 30]


# --- brute force


@st.composite
def problems(draw: st.DrawFn, *, legal: bool) -> tuple[AttentionSpec, Lists]:
    requests = draw(st.integers(1, 3))
    spec = AttentionSpec(
        num_qo_heads=2,
        num_kv_heads=draw(st.sampled_from((1, 2))),
        head_dim_qk=2,
        head_dim_vo=2,
        page_size=draw(st.sampled_from((1, 4, 16))),
        seq_lens=tuple(draw(st.integers(0, 20)) for _ in range(requests)),
        qo_lens=tuple(draw(st.integers(0, 4)) for _ in range(requests)),
        dtype=DType.FP32,
        sm_scale=1.0,
        block_size=draw(st.sampled_from((1, 1, 3, 8))),
        candidate_kind=draw(st.sampled_from((CandidateKind.SET, CandidateKind.MULTISET) if legal else CandidateKind)),
        causal=draw(st.sampled_from((CausalRule.NONE, CausalRule.BOTTOM_RIGHT))),
        window_left=draw(st.sampled_from((-1, 0, 3))),
    )
    lists = []
    for token in range(spec.num_tokens):
        seq_len, position = spec.seq_lens[spec.token_request[token]], spec.token_position[token]
        token_list = spec.block_size == 1 and spec.causal is not CausalRule.NONE
        last = min(seq_len - 1, position) if token_list else seq_len - 1
        entry = st.just(-1)
        if legal:
            entry = st.one_of(entry, st.integers(0, last // spec.block_size)) if last >= 0 else entry
        else:
            entry = st.integers(-3, seq_len // spec.block_size + 1)
        lists += [draw(st.lists(entry, max_size=8)) for _ in range(spec.num_kv_heads)]
    return spec, lists


def brute_edges(spec: AttentionSpec, lists: Lists) -> dict[tuple[int, int], int]:
    """(row, t) -> multiplicity, one token at a time."""
    found: Counter[tuple[int, int]] = Counter()
    for row, entries in enumerate(lists):
        token = row // spec.num_kv_heads
        seq_len, position = spec.seq_lens[spec.token_request[token]], spec.token_position[token]
        names = [entry for entry in entries if entry != -1]
        for entry in names if spec.candidate_kind is CandidateKind.MULTISET else set(names):
            for t in range(entry * spec.block_size, (entry + 1) * spec.block_size):
                seen = t < seq_len and (spec.causal is CausalRule.NONE or t <= position)
                if seen and (spec.window_left < 0 or t >= position - spec.window_left):
                    found[row, t] += 1
    return dict(found)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(problems(legal=True))
def test_validated_lists_name_the_edges_that_python_sets_name(problem: tuple[AttentionSpec, Lists]) -> None:
    spec, lists = problem
    validated = validate(spec, csr(lists), table_of(spec), sentinels=(-1,))
    real = [[entry for entry in entries if entry != -1] for entries in lists]
    starts = validated.indptr.tolist()
    assert len(starts) == spec.num_rows + 1
    found = [validated.indices[a:b].tolist() for a, b in pairwise(starts)]
    assert found == [sorted(set(entries)) for entries in real]
    if spec.candidate_kind is CandidateKind.SET:
        assert validated.duplicates == sum(len(entries) - len(set(entries)) for entries in real)
    rows, t, count = (x.tolist() for x in edges(spec, validated))
    assert len(set(zip(rows, t, strict=True))) == len(rows)
    assert dict(zip(zip(rows, t, strict=True), count, strict=True)) == brute_edges(spec, lists)


def brute_faults(spec: AttentionSpec, lists: Lists) -> list[tuple[Severity, Row, int, int]]:
    faults = []
    for row, entries in enumerate(lists):
        token = row // spec.num_kv_heads
        seq_len, position = spec.seq_lens[spec.token_request[token]], spec.token_position[token]
        for entry, value in enumerate(entries):
            severity = None
            if value < 0:
                severity = Severity.OUT_OF_RANGE
            elif value * spec.block_size >= seq_len:
                severity = Severity.UNCOMMITTED
            elif spec.causal is not CausalRule.NONE and spec.block_size == 1 and value > position:
                severity = Severity.ACAUSAL
            elif spec.candidate_kind is CandidateKind.SEQUENCE and value in entries[:entry]:
                severity = Severity.DUPLICATE
            if severity is not None:
                faults.append((severity, spec.row(row), entry, value))
    return faults


@settings(max_examples=300, deadline=None, derandomize=True)
@given(problems(legal=False))
def test_every_illegal_entry_is_called_one_name_and_no_legal_one_is(problem: tuple[AttentionSpec, Lists]) -> None:
    spec, lists = problem
    try:
        validate(spec, csr(lists), table_of(spec))
        found = []
    except CandidateError as error:
        found = [e[:4] for e in error.entries]
    assert sorted(found) == sorted(brute_faults(spec, lists))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(*[st.lists(st.integers(-3, 45), max_size=12)] * 3, st.integers(0, 40), st.sampled_from((1, 7, 16)))
def test_normalisation_is_the_union_of_the_branches_within_t(
    dynamic: list[int], window: list[int], sinks: list[int], seq_len: int, page_size: int
) -> None:
    table = table_of(replace(SPEC, page_size=page_size, seq_lens=(33, seq_len)))
    triples = normalize(dynamic, window, sinks, seq_len, table, 1)
    expected = sorted({t for t in (*dynamic, *window, *sinks) if 0 <= t < seq_len})
    assert [triple.t for triple in triples] == expected
    assert [triple.logical for triple in triples] == [divmod(t, page_size) for t in expected]
    physical = [(table.table[1, t // page_size], t % page_size) for t in expected]
    assert [triple.physical for triple in triples] == physical


def test_a_page_table_with_too_few_columns_is_named() -> None:
    table = table_of(SPEC)
    error = rejected(
        SPEC, csr([[SPEC.seq_lens[0] - 1], *[[]] * (SPEC.num_rows - 1)]), replace(table, table=table.table[:, :1])
    )
    assert "but the page table has 1 columns" in str(error)
