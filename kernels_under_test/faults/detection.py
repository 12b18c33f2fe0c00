"""Faults of one request, at a place drawn at random, seeded in the emulation: the rows of docs/detection.md.

Each changes what the model reads (`Rows` of the request), how it computes (a patch) or what it returns.
"""

from __future__ import annotations

import importlib
import math
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sacts.conformance.adapter import Capabilities, Case, Outputs
from sacts.reference.spec import DType

from ..emulation.arithmetic import Arithmetic
from ..emulation.dequantise import coded_caches
from ..emulation.forward import forward
from ..emulation.rows import by_token, rows_of
from ..emulation.terms import Rows
from . import ModelFault, patched

PAGE = 16
TAIL = 7  # slots behind the last token that a kernel may forget to mask
WRONG_GAIN = 1e-3


class Chance:
    """Where a fault strikes: numbers from a seed."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def below(self, n: int) -> int:
        """One of 0..n-1."""
        return int(torch.randint(n, (), generator=self._generator))

    def like(self, x: Tensor) -> Tensor:
        """Gaussian values."""
        return torch.randn(x.shape, generator=self._generator).to(x.dtype)


Change = Callable[[Rows, Chance], Rows]


def _kept(rows: Rows, keep: Tensor) -> Rows:
    """Only some slots [K]."""
    return _slots(rows, torch.nonzero(keep)[:, 0])


def _slots(rows: Rows, at: Tensor) -> Rows:
    """The slots `at`, in this order."""
    fields = ("k", "v", "edge", "counts", "key_position", "slot", "token")
    return rows._replace(**{name: getattr(rows, name)[:, at] for name in fields})


def _appended(rows: Rows, k: Tensor, v: Tensor) -> Rows:
    """More slots, [R, n, d] each; where they stand does not matter to the terms of a plain row."""
    repeated = _slots(rows, torch.cat((torch.arange(rows.k.shape[1]), torch.zeros(k.shape[1], dtype=torch.long))))
    return repeated._replace(k=torch.cat((rows.k, k), dim=1), v=torch.cat((rows.v, v), dim=1))


def _drop(rows: Rows, chance: Chance) -> Rows:
    lost = chance.below(rows.k.shape[1])
    return _kept(rows, torch.arange(rows.k.shape[1]) != lost)


def _drop_least(rows: Rows, chance: Chance) -> Rows:
    lost = int((rows.q[0, 0] @ rows.k[0].T).argmin())
    return _kept(rows, torch.arange(rows.k.shape[1]) != lost)


def _double(rows: Rows, chance: Chance) -> Rows:
    n = rows.k.shape[1]
    return _slots(rows, torch.cat((torch.arange(n), torch.tensor([chance.below(n)]))))


def _one_more(rows: Rows, chance: Chance) -> Rows:
    return _appended(rows, chance.like(rows.k[:, :1]), chance.like(rows.v[:, :1]))


def _one_less(rows: Rows, chance: Chance) -> Rows:
    return _kept(rows, torch.arange(rows.k.shape[1]) != 0)


def _masked_late(rows: Rows, chance: Chance) -> Rows:
    return _appended(rows, chance.like(rows.k[:, :TAIL]), torch.zeros_like(rows.v[:, :TAIL]))


def _zero_tail(rows: Rows, chance: Chance) -> Rows:
    return _appended(rows, torch.zeros_like(rows.k[:, :TAIL]), torch.zeros_like(rows.v[:, :TAIL]))


def _two_pages(rows: Rows, chance: Chance) -> tuple[slice, slice]:
    pages = rows.k.shape[1] // PAGE
    first = chance.below(pages)
    second = (first + 1 + chance.below(pages - 1)) % pages
    return slice(first * PAGE, (first + 1) * PAGE), slice(second * PAGE, (second + 1) * PAGE)


def _wrong_page(rows: Rows, chance: Chance) -> Rows:
    here, there = _two_pages(rows, chance)
    k, v = rows.k.clone(), rows.v.clone()
    k[:, here], v[:, here] = rows.k[:, there], rows.v[:, there]
    return rows._replace(k=k, v=v)


def _wrong_page_of_v(rows: Rows, chance: Chance) -> Rows:
    return rows._replace(v=_wrong_page(rows, chance).v)


def _swapped(rows: Rows, chance: Chance) -> Rows:
    a, b = chance.below(rows.v.shape[1] - 1), rows.v.shape[1] - 1
    v = rows.v.clone()
    v[:, [a, b]] = rows.v[:, [b, a]]
    return rows._replace(v=v)


def _scale_ratio(case: Case, rows: Rows, scales: Tensor | None) -> Tensor:
    """Scale of the request's next logical page over the own one, of scales by page: [R, K, 1]."""
    assert scales is not None
    page, physical = rows.token // PAGE, rows.slot // (PAGE * case.spec.num_kv_heads)
    table = torch.zeros(int(page.max()) + 1, dtype=torch.long).scatter(0, page[0], physical[0])
    by_page = scales.flatten()
    ratio: Tensor = by_page[table[(page + 1) % len(table)]] / by_page[physical]
    return ratio[..., None]


def _k_scales(case: Case, rows: Rows, chance: Chance) -> Rows:
    return rows._replace(k=rows.k * _scale_ratio(case, rows, case.k_scales))


def _k_scale_of_one_page(case: Case, rows: Rows, chance: Chance) -> Rows:
    page = rows.token // PAGE
    here = page == chance.below(int(page.max()) + 1)
    return rows._replace(k=torch.where(here[..., None], _k_scales(case, rows, chance).k, rows.k))


def _v_scales(case: Case, rows: Rows, chance: Chance) -> Rows:
    return rows._replace(v=rows.v * _scale_ratio(case, rows, case.v_scales))


CHANGES: dict[str, Change] = {
    "drop one": _drop,
    "drop the least relevant": _drop_least,
    "duplicate one": _double,
    "window + 1": _one_more,
    "window - 1": _one_less,
    "mask after exp (7 slots)": _masked_late,
    "zero tail keys unmasked": _zero_tail,
    "wrong page": _wrong_page,
    "wrong page, V only": _wrong_page_of_v,
    "two V rows swapped": _swapped,
}
SCALES = {
    "K scale off by one page, all": _k_scales,
    "K scale wrong, one page": _k_scale_of_one_page,
    "V scale off by one page": _v_scales,
}
# The axes that a fault needs beside those of a plain cell: scales need codes, dropout needs dropout.
AXES: dict[str, dict[str, object]] = {
    **{fault: {"kcodec": "int8", "vcodec": "int8", "scales": "page"} for fault in SCALES},
    "dropout on the denominator too": {"dropout": 25},
}
RETURNED = ("LSE in base 2", "LSE misses a split", "gain 1e-3")
SINGLE_SPLIT = ("accumulator never rescaled", "one late rescale skipped")


@cache
def patches() -> dict[str, ModelFault]:
    """The faults that are patches, by name."""
    entries: list[dict[str, Any]] = tomllib.loads(
        Path(__file__).with_name("detection.toml").read_text(encoding="utf-8")
    )["fault"]
    return {
        entry["name"]: ModelFault(
            **entry | {"name": f"detection_{i}", "stands_for": entry["name"], "problem": "", "outputs": ()}
        )
        for i, entry in enumerate(entries)
    }


def names() -> tuple[str, ...]:
    """All faults of the table."""
    return (*CHANGES, *SCALES, *RETURNED, *patches())


@dataclass(frozen=True)
class OneFault:
    """The emulation, but for one request, which has a fault (empty: none); `seed` says where it strikes."""

    fault: str
    request: int
    seed: int
    dtype: DType = DType.BF16

    @property
    def arithmetic(self) -> Arithmetic:
        """A usual kernel: P in the dtype, a fast exponential, several splits unless the fault needs one."""
        splits = 1 if self.fault in SINGLE_SPLIT else 4
        return Arithmetic(p=self.dtype, out=self.dtype, exp2="truncated", splits=splits, tile=64)

    @property
    def capabilities(self) -> Capabilities:
        """As the emulation's."""
        return Capabilities(numerics={self.dtype: self.arithmetic.numerics})

    def run(self, case: Case, plan: Any = None) -> Outputs:
        """Forward of all rows, those of one request wrongly."""
        rows = rows_of(case, *coded_caches(case), self.arithmetic.reconstructed)
        out, lse = forward(case.spec, rows, self.arithmetic)
        mine = torch.tensor([case.spec.row(i).request == self.request for i in range(case.spec.num_rows)])
        if self.fault and mine.any():
            out[mine], lse[mine] = self._wrong(case, Rows(*(x[mine] for x in rows)))
        case.out.copy_(by_token(case.spec, out))
        case.lse.copy_(by_token(case.spec, lse))
        return Outputs(case.out, case.lse)

    def _wrong(self, case: Case, rows: Rows) -> tuple[Tensor, Tensor]:
        spec, how = case.spec, self.arithmetic
        if self.fault in CHANGES:
            real = _kept(rows, rows.edge[0])
            return forward(spec, CHANGES[self.fault](real, Chance(self.seed)), how)
        if self.fault in SCALES:
            return forward(spec, SCALES[self.fault](case, rows, Chance(self.seed)), how)
        if self.fault in patches():
            module = importlib.import_module(f"{patched(patches()[self.fault], 'emulation')}.forward")
            found: tuple[Tensor, Tensor] = module.forward(spec, rows, how)
            return found
        gain = torch.tensor(1 + WRONG_GAIN) if self.fault == "gain 1e-3" else None
        out, lse = forward(spec, rows, how, gain)
        if self.fault == "LSE in base 2":
            lse = lse / math.log(2)
        if self.fault == "LSE misses a split":
            split = -(-rows.k.shape[1] // (how.splits * how.tile)) * how.tile
            some = torch.arange(rows.k.shape[1]) < rows.k.shape[1] - split
            lse = forward(spec, _kept(rows, some), replace(how, splits=1))[1]
        return out, lse
