"""Gated branches: to the judge each request stands as often as there are branches, side by side (branch b of request n
is its "request" n * branches + b), over the same pages, with lists of its own. To the backend it stands once, with the
lists of all branches. Here one becomes the other.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from sacts.reference.candidates import CandidateLists
from sacts.reference.paging import PageTable
from sacts.reference.spec import AttentionSpec
from sacts.reports.records import Finding

from .draw import Draw, Ints

Array = NDArray[np.float64]

GATE_LEAST, GATE_SPAN = 0.5, 1.0  # sizes of drawn gates: none so small that its branch would not show
GATE_STEPS = 1 << 16


def unfolded(spec: AttentionSpec, branches: int) -> AttentionSpec:
    """The judge's spec of a call with branches, from that of the same call with one."""
    order = [n for n in range(spec.num_requests) for _ in range(branches)]
    tokens = [t for n in order for t in range(spec.qo_indptr[n], spec.qo_indptr[n + 1])]
    uids = spec.dropout and (spec.dropout.request_uids or tuple(range(spec.num_requests)))
    return replace(
        spec,
        seq_lens=tuple(spec.seq_lens[n] for n in order),
        qo_lens=tuple(spec.qo_lens[n] for n in order),
        query_positions=tuple(spec.query_positions[t] for t in tokens) if spec.query_positions else (),
        dropout=spec.dropout and replace(spec.dropout, request_uids=tuple(uids[n] for n in order) if uids else ()),
    )


def folded(spec: AttentionSpec, branches: int) -> AttentionSpec:
    """What a backend sees of the judge's spec: each request once."""
    if branches == 1:
        return spec
    tokens = tokens_of(spec, branches, 0).tolist()
    rows = rows_of_lists(spec, branches).tolist()
    return replace(
        spec,
        seq_lens=spec.seq_lens[::branches],
        qo_lens=spec.qo_lens[::branches],
        query_positions=tuple(spec.query_positions[t] for t in tokens) if spec.query_positions else (),
        query_ordinals=tuple(spec.query_ordinals[r] for r in rows) if spec.query_ordinals else (),
        dropout=spec.dropout and replace(spec.dropout, request_uids=spec.dropout.request_uids[::branches]),
        num_branches=branches,
    )


def unfolded_table(table: PageTable, branches: int) -> PageTable:
    """The same row of pages for all branches of a request."""
    owned = tuple(pages for pages in table.owned for _ in range(branches))
    return replace(table, table=np.repeat(table.table, branches, axis=0), owned=owned)


def tokens_of(spec: AttentionSpec, branches: int, branch: int) -> Ints:
    """The judge's token of one branch for each token of the backend: [num_tokens of the backend]."""
    requests = range(branch, spec.num_requests, branches)
    parts = [np.arange(spec.qo_indptr[n], spec.qo_indptr[n + 1]) for n in requests]
    return np.concatenate([np.zeros(0, np.int64), *parts])


def rows_of_lists(spec: AttentionSpec, branches: int) -> Ints:
    """The judge's candidate row of each list of the backend: [branches * num_rows of the backend]."""
    tokens = np.concatenate([tokens_of(spec, branches, branch) for branch in range(branches)])
    rows: Ints = (tokens[:, None] * spec.list_heads + np.arange(spec.list_heads)).ravel()
    return rows


def rearranged(lists: CandidateLists, rows: Ints) -> CandidateLists:
    """Lists in another order: list i of the result is list rows[i]."""
    lengths = np.diff(lists.indptr)[rows]
    indptr = np.concatenate(([0], np.cumsum(lengths)))
    at = np.arange(indptr[-1]) + np.repeat(lists.indptr[rows] - indptr[:-1], lengths)
    return CandidateLists(indptr, lists.indices[at])


def one_hot(tokens: int, heads: int, branches: int, branch: int) -> Array:
    """Gates under which out is that of one branch: [tokens, heads, branches]."""
    gates = np.zeros((tokens, heads, branches))
    gates[..., branch] = 1.0
    return gates


def drawn_gates(shape: tuple[int, ...], draw: Draw) -> Array:
    """Gates of both signs, each another number, exact in FP32 and in no shorter format: [tokens, heads, branches]."""
    n = int(np.prod(shape))
    step = draw.permutation(max(n, GATE_STEPS))[:n].reshape(shape) | 1
    sizes = GATE_LEAST + GATE_SPAN * step / max(n, GATE_STEPS)
    gates: Array = draw.signs(shape) * sizes.astype(np.float32)
    return gates


def joined(parts: Sequence[int]) -> int:
    """The number of branches of problems that share a launch. Raises ValueError where they differ."""
    if len(set(parts)) > 1:
        raise ValueError(f"problems of {', '.join(map(str, sorted(set(parts))))} branches cannot share a launch")
    return parts[0]


def renamed(words: str, branches: int) -> str:
    """Words about the judge's requests in the cell's own names: request and branch of a row, else the request."""
    if branches == 1:
        return words

    def named(found: re.Match[str]) -> str:
        request, branch = divmod(int(found[1]), branches)
        return f"request {request}, branch {branch}{found[2]}" if found[2] else f"request {request}"

    return re.sub(r"\brequest (\d+)(, (?:last )?query\b)?", named, words)


def told(finding: Finding | None, branches: int) -> Finding | None:
    """A finding in the cell's own names."""
    if finding is None or branches == 1:
        return finding
    place, words = (renamed(text, branches) for text in (finding.place, finding.sentence))
    return structs.replace(finding, place=place, sentence=words)
