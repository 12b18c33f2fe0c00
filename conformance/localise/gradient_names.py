"""Elements, slots and rows of gradients in the field's words."""

from __future__ import annotations

from ..probes.gradients import GradientCopy


def element_name(copy: GradientCopy, output: str, element: tuple[int, ...]) -> str:
    """An element in the field's words."""
    if output == "d_sink":
        return f"query head {element[0]}"
    if output == "d_q":
        token, head, channel = element
        row = copy.problem.spec.row(copy.problem.spec.row_of(token, head))
        return f"request {row.request}, query {row.query}, head {head}, channel {channel}"
    return f"{slot_name(copy, element[:3])}, KV head {element[2]}, channel {element[3]}"


def slot_name(copy: GradientCopy, slot: tuple[int, ...]) -> str:
    """Whose a slot (live page, offset, KV head) is, and where."""
    problem, (page, offset) = copy.problem, slot[:2]
    owner, position = int(problem.slot_request[page, offset]), int(problem.slot_token[page, offset])
    where = f"physical page {int(problem.pages[page])} offset {offset}"
    if not problem.needed[tuple(slot[:3])]:
        who = "no request's page" if owner < 0 else f"request {owner}, token {position}"
        return f"{where}, which no row attends: {who}"
    return f"request {owner}, token {position} at {where}"


def row_name(copy: GradientCopy, row: tuple[int, int]) -> str:
    """An output row (token, query head)."""
    spec = copy.problem.spec
    of = spec.row(spec.row_of(*row))
    request = f"request {of.request}, " if spec.num_requests > 1 else ""
    return f"{request}query {of.query}, head {row[1]}"
