"""Where is a gradient wrong, and which edge made it so? Backward is launched again with d_out zero outside some rows:
what comes back is the contribution of these rows alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from sacts.reference import scores
from sacts.reference.edges import row_kv_heads
from sacts.reference.forward import edges
from sacts.reports.records import Finding, Gate

from ..adapter import Refused
from ..backward_launch import ObservedGradients, call_of, launch_backward
from ..contract import AdapterRaised, ContractBroken
from ..gates.gradients import bounds_of, uses
from ..launch import Launcher
from ..messages import BUDGET
from ..probes.gradients import Edges, GradientCopy, attended_edges, is_plain
from .deltas import NEAR, another_row, called, deltas, wrong_delta
from .gradient_names import element_name, row_name, slot_name
from .launches import BudgetSpent

Array = NDArray[np.float64]
Ints = NDArray[np.int64]
Rows = list[tuple[int, int]]

CUT_AGAIN = 8  # wrong parts of a row's keys that are looked at more closely


@dataclass(frozen=True)
class GradientLocation:
    """Where a gradient is wrong. `output`, `element`: its name and index; `row`: (token, query head) of the edge that
    is to blame and `slot` its (live page, offset, KV head), where they are known; `launches`: extra ones.
    """

    finding: Finding
    output: str
    element: tuple[int, ...]
    row: tuple[int, int] | None
    slot: tuple[int, int, int] | None
    launches: int


@dataclass(frozen=True)
class _Blame:
    words: str
    row: tuple[int, int] | None = None
    slot: tuple[int, int, int] | None = None


class _Meter:
    """Launches backward on variations of one copy, and counts."""

    def __init__(self, launcher: Launcher, copy: GradientCopy, budget: int) -> None:
        self.launcher, self.copy, self.budget, self.launches = launcher, copy, budget, 0
        spec, hints = copy.problem.spec, copy.problem.hints
        self.numerics = launcher.backend.numerics(spec.dtype, hints)

    def __call__(self, copy: GradientCopy) -> ObservedGradients:
        """One launch. Raises BudgetSpent, and what a launcher raises."""
        if self.launches >= self.budget:
            raise BudgetSpent(f"all {self.budget} launches are used")
        self.launches += 1
        return launch_backward(self.launcher, copy.problem, copy.inputs, copy.call)

    def only(self, rows: Rows) -> GradientCopy:
        """The copy with d_out of these output rows alone."""
        some = np.zeros(self.copy.call.lse.shape, bool)
        some[tuple(np.array(rows).T)] = True
        call = self.copy.call.only(some)
        bounds = bounds_of(self.copy.problem, self.copy.inputs, call, self.numerics)
        return replace(self.copy, call=call, bounds=bounds)


def locate_gradient(
    launcher: Launcher, copy: GradientCopy, observed: ObservedGradients, *, budget: int = BUDGET
) -> GradientLocation | None:
    """The worst element of the first output that leaves its bounds, and the edge that is to blame; None where nothing
    is wrong. Raises nothing that further launches raise: the sentence says so.
    """
    use = uses(copy.bounds, observed)
    output = next((name for name, each in use.items() if (each > 1).any()), None)
    if output is None:
        return None
    element = tuple(int(i) for i in np.unravel_index(int(use[output].argmax()), use[output].shape))
    meter = _Meter(launcher, copy, budget)
    try:
        blame = _BLAME[output](meter, observed, output, element)
    except BudgetSpent as spent:
        blame = _Blame(f"; {spent}")
    except (ContractBroken, AdapterRaised, Refused) as broken:
        blame = _Blame(f"; a launch with less then failed otherwise: {broken}")
    of, seen = copy.bounds.allowed[output], float(getattr(observed, output)[element])
    place = f"{output} ({element_name(copy, output, element)})"
    wrong = ", ".join(
        f"{int((each > 1).sum())} of {each.size} of {name}" for name, each in use.items() if (each > 1).any()
    )
    within = f" in a copy of {copy.of}" if copy.of else ""
    launches = f", {meter.launches} more launch{'es'[: 2 * (meter.launches > 1)]}" if meter.launches else ""
    sentence = (
        f"{place} is {seen:.6g}, allowed {of.low[element]:.6g} to {of.high[element]:.6g}{blame.words} "
        f"({wrong} are outside{within}{launches})"
    )
    finding = Finding(Gate.GRADIENTS, place, sentence, use=float(use[output][element]))
    return GradientLocation(finding, output, element, blame.row, blame.slot, meter.launches)


# --- d_k and d_v: which row


def _of_key(meter: _Meter, observed: ObservedGradients, output: str, element: tuple[int, ...]) -> _Blame:
    copy = meter.copy
    slot = (element[0], element[1], element[2])
    rows = _attending(copy, slot)
    if not rows:
        moved = _moved(copy, observed, output, slot)
        return _Blame(f": no row attends this slot{moved}", None, slot)
    suspect = _suspect(meter, observed, output, slot, rows)
    tried = [suspect] if suspect else rows
    seen, part = observed, copy
    if len(rows) > 1:
        tried, seen, part = _halved(meter, output, slot, rows, tried)
    if len(tried) > 1:
        names = f"{row_name(copy, tried[0])} to {row_name(copy, tried[-1])}"
        words = f": the rows {names} are each right alone and wrong together: the sum of {len(tried)} rows is wrong"
        return _Blame(words, None, slot)
    return _Blame(_of_edge(meter, part, seen, output, slot, tried[0]), tried[0], slot)


def _attending(copy: GradientCopy, slot: tuple[int, int, int]) -> Rows:
    """The output rows that attend a physical slot, each once."""
    problem = copy.problem
    spec = problem.spec
    row, t, _ = edges(spec, problem.candidates)
    request = np.asarray(spec.token_request, np.int64)[row // spec.list_heads]
    logical, offset = np.divmod(t, spec.page_size)
    page = np.searchsorted(problem.pages, problem.table.table[request, logical])
    here = (page == slot[0]) & (offset == slot[1]) & (row_kv_heads(spec, row) == slot[2])
    token, first = np.divmod(list(dict.fromkeys(row[here].tolist())), spec.list_heads)
    heads = range(spec.heads_per_list)
    served = zip(token.tolist(), (first * spec.heads_per_list).tolist(), strict=True)
    return [(token, first + lane) for token, first in served for lane in heads]


def _suspect(
    meter: _Meter, observed: ObservedGradients, output: str, slot: tuple[int, int, int], rows: Rows
) -> tuple[int, int] | None:
    """The one row whose contribution is what the slot lacks, or has too much of, in every channel."""
    copy = meter.copy
    if not is_plain(copy.problem.spec):
        return None
    edge = attended_edges(copy.problem, copy.inputs, copy.call)
    here = np.flatnonzero((edge.page == slot[0]) & (edge.offset == slot[1]) & (edge.head == slot[2]))
    off = getattr(observed, output)[slot] - copy.bounds.allowed[output].value[slot]
    needed = copy.bounds.noticed(output)[slot]
    found = []
    for token, head in rows:
        mine, lane = edge.of(token, head)
        some = np.isin(mine, here)
        at = mine[some], lane[some]
        weight, operand = (edge.p, copy.call.d_out) if output == "d_v" else (edge.d_s, copy.inputs.q)
        scale = 1.0 if output == "d_v" else copy.problem.spec.sm_scale
        part = scale * float(weight[at].sum()) * operand[token, head]
        if (np.abs(part) > needed).any() and min(np.abs(off + part).max(), np.abs(off - part).max()) <= needed.max():
            found.append((token, head))
    return found[0] if len(found) == 1 else None


def _halved(
    meter: _Meter, output: str, slot: tuple[int, int, int], rows: Rows, first: Rows
) -> tuple[Rows, ObservedGradients, GradientCopy]:
    """The fewest rows that are wrong by themselves at a slot, with what they gave: `first` is tried before all halves.
    Where both halves are right, their whole is returned.
    """
    wrong: tuple[Rows, ObservedGradients, GradientCopy] | None = None
    if len(first) == 1:
        wrong = _if_wrong(meter, output, slot, first)
    while wrong is None or len(wrong[0]) > 1:
        whole = wrong[0] if wrong else rows
        if len(whole) == 1:
            break
        half = len(whole) // 2
        parts = (whole[:half], whole[half:])
        worse = next((found for part in parts if (found := _if_wrong(meter, output, slot, part))), None)
        if worse is None:
            part = meter.only(whole)
            return whole, wrong[1] if wrong else meter(part), part
        wrong = worse
    assert wrong is not None
    return wrong


def _if_wrong(
    meter: _Meter, output: str, slot: tuple[int, int, int], rows: Rows
) -> tuple[Rows, ObservedGradients, GradientCopy] | None:
    part = meter.only(rows)
    seen = meter(part)
    return (rows, seen, part) if (uses(part.bounds, seen)[output][slot] > 1).any() else None


def _of_edge(
    meter: _Meter,
    part: GradientCopy,
    seen: ObservedGradients,
    output: str,
    slot: tuple[int, int, int],
    row: tuple[int, int],
) -> str:
    """What one row does to a slot, as against what it should; `part` has d_out of this row alone."""
    right, found = part.bounds.allowed[output], getattr(seen, output)
    name, many = row_name(part, row), np.asarray((uses(part.bounds, seen)[output] > 1).any(axis=-1))
    channel = int(np.abs(right.value[slot]).argmax())
    own = f"its own contribution to channel {channel} is {right.value[slot][channel]:.4g}"
    keys = np.asarray((right.value != 0).any(axis=-1) | many)
    if many.sum() > 1 and many[keys].mean() > 0.5 and (words := _of_row(meter, part, seen, output, row, keys)):
        return f": {words}"
    factor, rest = _factor(found[slot], right.value[slot])
    if not np.isfinite(found[slot]).all():
        return f": the edge of {name} gives {found[slot][channel]:.4g} ({own})"
    if not right.value[slot].any():
        why = "dropped" if part.problem.spec.dropout else "of no weight"
        return f": the edge of {name} is {why}, yet gives {found[slot][int(np.abs(found[slot]).argmax())]:.4g}"
    if _turned(part, found[slot], right.value[slot]):
        return f": the edge of {name} is turned by a wrong angle, each pair of channels by itself ({own})"
    if (np.abs(found[slot]) <= part.bounds.noticed(output)[slot] * NEAR).all() or abs(factor) < NEAR > rest:
        return f": the edge of {name} is missing ({own}){_moved(part, seen, output, slot)}"
    if rest < NEAR and abs(factor - 2) < NEAR:
        return f": the edge of {name} is counted twice ({own})"
    if rest < NEAR:
        return f": the edge of {name} counts {factor:.4g} times ({own})"
    return f": the edge of {name} gives {found[slot][channel]:.4g} ({own}){_moved(part, seen, output, slot)}"


def _moved(copy: GradientCopy, seen: ObservedGradients, output: str, slot: tuple[int, int, int]) -> str:
    """Where else the slot's own gradient stands, and whose it holds, among the slots that are wrong."""
    right, found, needed = copy.bounds.allowed[output].value, getattr(seen, output), copy.bounds.noticed(output)
    wrong = np.array((uses(copy.bounds, seen)[output] > 1).any(axis=-1))
    wrong[slot] = False
    others = np.argwhere(wrong)
    at = tuple(others.T)
    words = ""
    for here, there, margin, says in (
        (found[slot], right[at], needed[at], "it holds what belongs to"),
        (right[slot], found[at], needed[slot], "what belongs here stands at"),
    ):
        same = (np.abs(there - here) <= margin).all(axis=-1) & (here != 0).any()
        if same.sum() == 1:
            other = tuple(int(i) for i in others[int(same.argmax())])
            words += f"; {says} {slot_name(copy, other)}, KV head {other[2]}"
    return words


def _of_row(
    meter: _Meter,
    part: GradientCopy,
    seen: ObservedGradients,
    output: str,
    row: tuple[int, int],
    keys: NDArray[np.bool_],
) -> str:
    """What is wrong with all edges of a row alike: one factor, or (d_k) D."""
    right, found = part.bounds.allowed[output].value[keys], getattr(seen, output)[keys]
    factor, rest = _factor(found, right)
    name = f"every edge of {row_name(part, row)}"
    if rest < min(NEAR, abs(factor - 1) / 4):
        if output == "d_v" and factor > 0:
            return f"{name} counts {factor:.4g} times: P is e^{np.log(factor):.3g} times as large, as with another lse"
        return f"{name} counts {factor:.4g} times"
    if output != "d_k" or not is_plain(part.problem.spec):
        return ""
    return _of_delta(meter, part, seen, row)


def _of_delta(meter: _Meter, part: GradientCopy, seen: ObservedGradients, row: tuple[int, int]) -> str:
    """dS_j - right = P_j c with one c for all keys: it is D, or d_lse, that is wrong. What c is called must hold for
    another row too.
    """
    by = wrong_delta(part, seen, row)
    if by is None:
        return ""
    said = called(part, row, by)
    if said and (other := another_row(part, row)):
        again = meter.only([other])
        more = wrong_delta(again, meter(again), other)
        said &= called(again, other, more) if more is not None else set()
    name, (delta, d_lse) = row_name(part, row), deltas(part, row)
    if said:
        return f"in every edge of {name} {' and '.join(sorted(said))} (D is {delta:.4g}, d_lse {d_lse:.4g})"
    return f"in every edge of {name} dS is off by {by:.4g} P, as with D {delta - by:.4g} instead of {delta:.4g}"


def _factor(found: Array, right: Array) -> tuple[float, float]:
    """f with found = f right, and how much of `found` (or, where that is nothing, of `right`) it leaves over."""
    size = float((right * right).sum())
    if not size or not np.isfinite(found).all():
        return 1.0, np.inf
    factor = float((found * right).sum() / size)
    rest = float(np.linalg.norm(found - factor * right) / max(np.linalg.norm(found), np.sqrt(size) * NEAR))
    return factor, rest


def _turned(copy: GradientCopy, found: Array, right: Array) -> bool:
    """Whether RoPE was not undone, or by another position: the channels are wrong, the length of each pair is right."""
    rope = copy.problem.spec.rope
    if rope is None:
        return False
    lengths = [np.hypot(*(x[channels] for channels in scores.pairs(rope))) for x in (found, right)]
    return bool(np.linalg.norm(lengths[0] - lengths[1]) < NEAR * np.linalg.norm(lengths[1]))


# --- d_q: which key


def _of_query(meter: _Meter, observed: ObservedGradients, output: str, element: tuple[int, ...]) -> _Blame:
    copy, row = meter.copy, (element[0], element[1])
    right, found = copy.bounds.allowed["d_q"].value[row], observed.d_q[row]
    factor, rest = _factor(found, right)
    if rest < min(NEAR, abs(factor - 1) / 4):
        return _Blame(f": d_q of {row_name(copy, row)} is {factor:.4g} times as large as it should be", row)
    if _turned(copy, found, right):
        return _Blame(
            f": d_q of {row_name(copy, row)} is turned by a wrong angle, each pair of channels by itself", row
        )
    if not is_plain(copy.problem.spec):
        return _Blame("", row)
    edge = attended_edges(copy.problem, copy.inputs, copy.call)
    keys, _ = edge.of(*row)
    while True:
        wrong, told, parts = _among(meter, edge, keys, row)
        if not len(wrong):
            return _Blame("; with q = 0 and one-hot K every edge of the row is right", row)
        if max(map(len, parts)) == 1:
            break
        keys = np.concatenate([parts[i] for i in wrong[:CUT_AGAIN].tolist()])
    slots = [tuple(int(x[keys[0]]) for x in edge.slot) for keys in (parts[i] for i in wrong.tolist())]
    seen, own = told[wrong[0]]
    share = seen / own if own else np.inf
    says = "is missing" if abs(share) < NEAR else "is counted twice" if abs(share - 2) < NEAR else f"gives {seen:.4g}"
    name = slot_name(copy, slots[0])
    more = f", and {len(slots) - 1} more" if len(slots) > 1 else ""
    first = (slots[0][0], slots[0][1], slots[0][2])
    return _Blame(f": the edge of {name} {says} in d_q (with q = 0 its dS is {own:.4g}){more}", row, first)


def _among(
    meter: _Meter, edge: Edges, keys: Ints, row: tuple[int, int]
) -> tuple[Ints, list[tuple[float, float]], list[Ints]]:
    """One launch with q = 0 and K one-hot over parts of these keys, so that each channel of d_q is the sum of dS of one
    part: the parts that are wrong, (observed, right) sums of dS, and the parts.
    """
    copy, problem = meter.copy, meter.copy.problem
    spec = problem.spec
    parts = [part for part in np.array_split(keys, min(len(keys), spec.head_dim_qk)) if len(part)]
    k = np.zeros_like(copy.inputs.k.data)
    for channel, part in enumerate(parts):
        page, offset, head = (x[part] for x in edge.slot)
        k[page, offset, head, channel] = 1.0
    inputs = problem.inputs(np.zeros_like(copy.inputs.q), k, copy.inputs.v.data)
    call = call_of(problem, inputs, meter.launcher.backend, copy.call.d_out, copy.call.d_lse)
    bounds = bounds_of(problem, inputs, call, meter.numerics)
    seen = meter(replace(copy, inputs=inputs, call=call, bounds=bounds))
    use, right = uses(bounds, seen)["d_q"][row], bounds.allowed["d_q"].value[row]
    told = [(float(seen.d_q[row][c] / spec.sm_scale), float(right[c] / spec.sm_scale)) for c in range(len(parts))]
    return np.flatnonzero(use[: len(parts)] > 1), told, parts


def _of_sink(meter: _Meter, observed: ObservedGradients, output: str, element: tuple[int, ...]) -> _Blame:
    """The first row of a query head whose own share is wrong, by halving."""
    copy, head = meter.copy, element[0]
    rows = [(token, head) for token in range(copy.problem.spec.num_tokens)]
    while len(rows) > 1:
        half = rows[: len(rows) // 2]
        part = meter.only(half)
        wrong = uses(part.bounds, meter(part))["d_sink"][head] > 1
        rows = half if wrong else rows[len(rows) // 2 :]
    part = meter.only(rows)
    own, found = part.bounds.allowed["d_sink"], meter(part).d_sink
    assert found is not None
    words = f"gives {float(found[head]):.4g} instead of {float(own.value[head]):.4g}"
    return _Blame(f": {row_name(copy, rows[0])} alone {words}", rows[0])


_BLAME = {"d_k": _of_key, "d_v": _of_key, "d_q": _of_query, "d_sink": _of_sink}
