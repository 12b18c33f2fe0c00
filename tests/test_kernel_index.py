"""The bundled index pipeline against the reference's select, unite, validate and normalize, item by item."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from sacts.kernels_under_test.faults import Fault, patched
from sacts.kernels_under_test.paged import index
from sacts.kernels_under_test.paged.index import HeadMerge, Selection, merged, slots_of, top
from sacts.reference.branches import GqaMerge, ScoredLists, merge_heads, select
from sacts.reference.candidates import fixed_sinks, local_window, normalize, unite, validate
from sacts.reference.paging import PageTable
from sacts.reference.spec import AttentionSpec, CandidateKind, CausalRule, DType, ListsPer

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Drawn:
    """A spec, scores of all its query heads [tokens * num_qo_heads, entries], what is selected and how heads merge."""

    spec: AttentionSpec
    scores: Array
    selection: Selection
    merge: HeadMerge
    table: PageTable


def table_of(spec: AttentionSpec, draw: np.random.Generator) -> PageTable:
    """Random pages in no order; of a request, one column more than it needs, which is stale."""
    pages = [-(-length // spec.page_size) for length in spec.seq_lens]
    pool = draw.permutation(sum(pages) + 7)
    table = draw.integers(0, len(pool), (len(pages), max(pages, default=0) + 1))
    owned, at = [], 0
    for request, count in enumerate(pages):
        table[request, :count] = pool[at : at + count]
        owned.append(frozenset(pool[at : at + count].tolist()))
        at += count
    return PageTable(table, spec.page_size, len(pool), tuple(owned))


def made(choose: Callable[[Sequence[Any]], Any], seed: int) -> Drawn:
    """A case whose fields are chosen, and whose scores and pages are those of the seed."""
    requests = range(choose((1, 2, 3)))
    merge, group, kv_heads = choose(tuple(HeadMerge)), choose((2, 1, 3)), choose((1, 2))
    spec = AttentionSpec(
        num_qo_heads=group * kv_heads,
        num_kv_heads=kv_heads,
        head_dim_qk=8,
        head_dim_vo=8,
        page_size=choose((4, 1, 16)),
        seq_lens=tuple(choose((13, 0, 1, 4, 16, 29, 40)) for _ in requests),
        qo_lens=tuple(choose((1, 0, 2, 3, 17)) for _ in requests),
        dtype=DType.FP32,
        sm_scale=1.0,
        block_size=choose((1, 3, 8)),
        candidate_kind=choose((CandidateKind.SET, CandidateKind.MULTISET)),
        causal=choose((CausalRule.NONE, CausalRule.BOTTOM_RIGHT, CausalRule.TOP_LEFT)),
        lists=ListsPer.QUERY_HEAD if merge is HeadMerge.PRIVATE else ListsPer.KV_HEAD,
    )
    entries = -(-max(spec.seq_lens) // spec.block_size) + choose((0, 1, 2))
    draw = np.random.default_rng(seed)
    levels = choose((3, 1, 1000))  # few levels: many ties
    scores = draw.integers(-levels, levels, (spec.num_tokens * spec.num_qo_heads, entries)).astype(np.float64)
    selection = Selection(choose((2, 0, 1, 5, 9, 50)), choose((2, 0, 1, 12)), choose((1, 0, 5)))
    return Drawn(spec, scores, selection, merge, table_of(spec, draw))


@st.composite
def drawn(given_: st.DrawFn) -> Drawn:
    return made(lambda values: given_(st.sampled_from(values)), given_(st.integers(0, 2**32)))


def random_case(seed: int) -> Drawn:
    draw = np.random.default_rng(seed)
    return made(lambda values: values[draw.integers(len(values))], seed)


def entries_seen(spec: AttentionSpec, token: int) -> int:
    """Entries that a selector may name for a token, by counting."""
    length, position = spec.seq_lens[spec.token_request[token]], spec.token_position[token]
    starts = range(0, length, spec.block_size)
    return sum(spec.causal is CausalRule.NONE or start <= position for start in starts)


def reference_of(case: Drawn) -> tuple[list[list[int]], list[list[int]]]:
    """Entries and counts of each row, by the reference."""
    spec, heads = case.spec, case.spec.num_qo_heads
    seen = [entries_seen(spec, token) for token in range(spec.num_tokens) for _ in range(heads)]
    indptr = np.concatenate(([0], np.cumsum(seen))).astype(np.int64)
    names = [np.arange(n) for n in seen]
    scores = [row[:n] for row, n in zip(case.scores, seen, strict=True)]
    all_of = ScoredLists(indptr, np.concatenate([*names, []]).astype(np.int64), np.concatenate([*scores, []]))
    best = select(merge_heads(all_of, heads, spec.num_kv_heads, GqaMerge(case.merge)), case.selection.k)
    window, sinks = local_window(spec, case.selection.window), fixed_sinks(spec, case.selection.sinks)
    right = validate(spec, unite(spec, best.lists(), window, sinks), case.table)
    parts = [slice(a, b) for a, b in zip(right.indptr, right.indptr[1:], strict=False)]
    return [right.indices[part].tolist() for part in parts], [right.counts[part].tolist() for part in parts]


Found = tuple[list[list[int]], list[list[int]], list[list[int]]]


def found_by(module: ModuleType, case: Drawn) -> Found:
    """Entries, counts and slots of each row, by the pipeline."""
    scores = module.merged(case.spec, torch.from_numpy(case.scores).float(), module.HeadMerge(case.merge))
    lists = module.lists_from(case.spec, scores, module.Selection(**vars(case.selection)))
    assert lists.kv_indptr.dtype == lists.kv_indices.dtype == torch.int32
    slots = module.slots_of(case.spec, torch.from_numpy(case.table.table).int(), lists.rows, lists.kv_indices)
    lengths = lists.kv_indptr.diff().tolist()
    entries, counts, places = (
        [part.tolist() for part in each.split(lengths)] if lengths else []
        for each in (lists.kv_indices, lists.counts, slots)
    )
    return entries, counts, places


def wrong_in(module: ModuleType, case: Drawn) -> str:
    """The first thing that is not as the reference has it, or nothing."""
    spec = case.spec
    entries, counts, slots = found_by(module, case)
    right, repeats = reference_of(case)
    if entries != right:
        return "entries"
    if spec.candidate_kind is CandidateKind.MULTISET and counts != repeats:
        return "counts"
    for row, (names, places) in enumerate(zip(entries, slots, strict=True)):
        request = spec.token_request[row // spec.list_heads]
        first = [name * spec.block_size for name in names]
        triples = normalize(first, [], [], spec.seq_lens[request], case.table, request)
        if [page * spec.page_size + offset for _, _, (page, offset) in triples] != places:
            return "slots"
    return ""


@settings(max_examples=250, deadline=None, derandomize=True)
@given(drawn())
def test_lists_counts_and_slots_are_those_of_the_reference(case: Drawn) -> None:
    assert not wrong_in(index, case)


def test_many_random_cases_are_right_too() -> None:
    """Hypothesis stays near simple cases."""
    assert [seed for seed in range(200) if wrong_in(index, random_case(seed))] == []


def spec_of(**fields: object) -> AttentionSpec:
    values = {"num_qo_heads": 1, "num_kv_heads": 1, "seq_lens": (10,), "qo_lens": (1,)} | fields
    return AttentionSpec(
        head_dim_qk=8, head_dim_vo=8, page_size=4, dtype=DType.FP32, sm_scale=1.0, **values  # type: ignore[arg-type]
    )  # fmt: skip


def lists_of(spec: AttentionSpec, scores: list[list[float]], *selection: int) -> list[list[int]]:
    lists = index.lists_from(spec, torch.tensor(scores), Selection(*selection))
    return [part.tolist() for part in lists.kv_indices.split(lists.kv_indptr.diff().tolist())]


# --- ties, and what is no number


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_of_equal_scores_the_lower_entry_wins_whatever_the_width(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    for width in (1, 7, 64, 3000):
        scores = torch.randint(-2, 3, (4, width), generator=draw).to(dtype)
        scores[scores == 0] *= -1  # -0.0 beside 0.0 is no lower
        scores[:, ::3] = scores[:, ::3].abs()
        for k in (1, width // 2, width):
            right = [sorted(range(width), key=lambda i: (-row[i], i))[:k] for row in scores.tolist()]
            assert top(scores, torch.full((4,), width), k).tolist() == right


def test_no_number_stands_with_minus_infinity_behind_all_others() -> None:
    nan, inf = float("nan"), float("inf")
    scores = torch.tensor([[nan, -inf, 1.0, inf, nan, 0.0, 5.0]])
    best = [top(scores, torch.tensor([6]), k).tolist()[0] for k in (2, 3, 4, 6, 9)]
    assert best == [[3, 2], [3, 2, 5], [3, 2, 5, 0], [3, 2, 5, 0, 1, 4], [3, 2, 5, 0, 1, 4, -1]]
    heads = torch.tensor([[nan, 2.0, 1.0], [4.0, 1.0, nan]])
    spec = spec_of(num_qo_heads=2, seq_lens=(3,))
    assert merged(spec, heads, HeadMerge.MAX).tolist() == [[4.0, 2.0, 1.0]]
    assert merged(spec, heads, HeadMerge.SUM).tolist() == [[-inf, 3.0, -inf]]


def test_a_sum_of_heads_is_not_rounded_before_it_is_compared() -> None:
    spec = spec_of(num_qo_heads=3, seq_lens=(2,))
    heads = torch.tensor([[2.0**30, 2.0**30], [1.0, 2.0], [-(2.0**30), -(2.0**30)]])
    assert lists_of(spec, merged(spec, heads, HeadMerge.SUM).tolist(), 1) == [[1]]


# --- edges of the union


def test_d_w_and_a_that_overlap_name_each_token_once_and_a_multiset_counts_them() -> None:
    spec = spec_of(candidate_kind=CandidateKind.MULTISET, causal=CausalRule.BOTTOM_RIGHT)
    scores = torch.tensor([[9.0, 0, 0, 0, 0, 0, 0, 0, 8.0, 7.0]])
    lists = index.lists_from(spec, scores, Selection(3, 2, 9))
    assert lists.kv_indices.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert lists.counts.tolist() == [2, 1, 1, 1, 1, 1, 1, 1, 3, 2]


def test_rows_that_see_nothing_are_empty_whatever_is_asked_for() -> None:
    spec = spec_of(seq_lens=(0, 2), qo_lens=(1, 4), causal=CausalRule.BOTTOM_RIGHT)
    scores = [[1.0, 2.0]] * 5
    assert lists_of(spec, scores, 5, 5, 5) == [[], [], [], [0], [0, 1]]
    assert lists_of(spec, scores, 0, 0, 0) == [[]] * 5
    empty = spec_of(seq_lens=(0,))
    assert lists_of(empty, [[]], 3, 3, 3) == [[]]


def test_a_partial_last_block_is_named_and_none_behind_it() -> None:
    spec = spec_of(block_size=4, seq_lens=(9,))
    assert lists_of(spec, [[0.0, 0.0, 1.0, 9.0, 9.0]], 2) == [[0, 2]]


@pytest.mark.parametrize(
    ("shape", "words"), [((2, 10), r"\[1, 10 or more\], got \(2, 10\)"), ((1, 9), r"got \(1, 9\)"), ((10,), "10,")]
)
def test_scores_of_another_shape_are_named(shape: tuple[int, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        index.lists_from(spec_of(), torch.zeros(shape), Selection(1))


def test_what_means_nothing_is_named() -> None:
    with pytest.raises(ValueError, match="window must not be negative, got -1"):
        Selection(1, -1)
    shared, private = spec_of(num_qo_heads=2), spec_of(num_qo_heads=2, lists=ListsPer.QUERY_HEAD)
    for spec, rule in ((shared, HeadMerge.PRIVATE), (private, HeadMerge.MAX), (private, HeadMerge.SUM)):
        with pytest.raises(ValueError, match=f"merge {rule} does not make lists per {spec.lists}"):
            merged(spec, torch.zeros(2, 10), rule)


def test_slots_of_aliased_pages_are_the_same_pages() -> None:
    spec = spec_of(seq_lens=(8, 8), qo_lens=(1, 1))
    table = torch.tensor([[5, 2], [5, 3]], dtype=torch.int32)
    rows, entries = torch.tensor([0, 0, 1, 1]), torch.tensor([1, 7, 1, 7])
    assert slots_of(spec, table, rows, entries).tolist() == [21, 11, 21, 15]


# --- faults


def fault(name: str, stands_for: str, find: str, replace: str) -> Fault:
    return Fault(f"index_{name}", stands_for, "index.py", find, replace, ("index",), "")


FAULTS = (
    fault(
        "unstable_ties",
        "ties at the k-th score are broken by the order in which threads finish",
        "ranked.sort(dim=1, descending=True, stable=True).indices[:, :k]",
        "ranked.topk(min(k, ranked.shape[1]), dim=1).indices",  # promises no order among equals
    ),
    fault(
        "window_off_by_one",
        "the local window begins one entry early",
        "_range((behind_own - selection.window).clamp(min=0), behind_own, selection.window)",
        "_range((behind_own - selection.window - 1).clamp(min=0), behind_own, selection.window + 1)",
    ),
    fault(
        "sinks_not_deduplicated",
        "sinks are put behind the deduplicated union of D and W",
        "    return distinct(rows[named >= 0], named[named >= 0], spec.num_rows)\n",
        """    sink = torch.arange(named.shape[1], device=named.device) >= named.shape[1] - selection.sinks
    inner, outer = (named >= 0) & ~sink, (named >= 0) & sink
    unique = distinct(rows[inner], named[inner], spec.num_rows)
    row, order = torch.cat((unique.rows, rows[outer])).sort(stable=True)
    entries = torch.cat((unique.kv_indices.long(), named[outer]))[order]
    counts = torch.cat((unique.counts, torch.ones_like(named[outer])))[order]
    row, order = ((row << 32) + entries).sort(stable=True)
    return csr(row >> 32, entries[order], counts[order], spec.num_rows)
""",
    ),
    fault(
        "cut_at_the_page",
        "lists are cut at the end of the last page instead of at T",
        "committed = (seq_lens + spec.block_size - 1) // spec.block_size",
        "seq_lens = (seq_lens + spec.page_size - 1) // spec.page_size * spec.page_size\n"
        "    committed = (seq_lens + spec.block_size - 1) // spec.block_size",
    ),
    fault(
        "future_tokens_selected",
        "the top k is taken before the causal rule, and what it hides is dropped from it",
        "dynamic = top(scores, end, selection.k)",
        "dynamic = top(scores, torch.full_like(end, scores.shape[1]), selection.k)\n"
        "    dynamic = torch.where(dynamic < end[:, None], dynamic, -1)",
    ),
    fault(
        "pages_by_rank",
        "the n-th entry of a list is looked up as if it were the n-th page of its request",
        "page = page_table[request, t // spec.page_size].long()",
        "page = page_table[request, torch.arange(len(t), device=t.device) % page_table.shape[1]].long()",
    ),
    fault(
        "tail_offset_lost",
        "slots are those of the page's first token",
        "page * spec.page_size + t % spec.page_size",
        "page * spec.page_size",
    ),
    fault(
        "sum_of_heads_for_the_largest",
        "the scores of a group are added where the largest is declared",
        "heads.amax(dim=1) if rule is HeadMerge.MAX else",
        "heads.sum(dim=1) if rule is HeadMerge.MAX else",
    ),
)
SHOWN = {"pages_by_rank": "slots", "tail_offset_lost": "slots"}


@pytest.mark.parametrize("wrong", FAULTS, ids=lambda each: each.name)
def test_a_seeded_fault_is_caught_where_it_stands(wrong: Fault) -> None:
    module = importlib.import_module(f"{patched(wrong, 'paged')}.index")
    shown: set[str] = set()

    for seed in range(40):
        try:
            shown.add(wrong_in(module, random_case(seed)))
        except IndexError:  # a page that the table does not have
            shown.add("entries")
    assert SHOWN.get(wrong.name.removeprefix("index_"), "entries") in shown
    assert wrong.name.removeprefix("index_") not in SHOWN or "entries" not in shown
