"""The few instructions of PTX that the kernels contain, done by numpy and torch: what a text makes of its words."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

Words = np.ndarray[Any, np.dtype[np.uint32]]  # a 32-bit register in each of many threads
Half = np.ndarray[Any, np.dtype[np.uint16]]


def run(text: str, outputs: int, *inputs: Words) -> list[Words]:
    """The output registers $0, $1 ... of a text whose inputs are the next ones. An output may share the register of an
    input (no constraint forbids it): once one is written the inputs are gone.
    """
    registers: dict[str, Any] = {f"${outputs + n}": words for n, words in enumerate(inputs)}
    for statement in re.sub(r"^\s*\{|\}\s*$", "", text).split(";"):
        name, _, rest = statement.strip().partition(" ")
        if name and name != ".reg":
            _do(name, re.findall(r"\{[^}]*\}|[^,\s]+", rest), registers)
        if any(f"${n}" in registers for n in range(outputs)):
            registers = {
                name: x for name, x in registers.items() if not name.startswith("$") or int(name[1:]) < outputs
            }
    return [registers[f"${n}"] for n in range(outputs)]


def _do(name: str, operands: list[str], registers: dict[str, Any]) -> None:
    to, *given = operands
    values = [registers[x] if x in registers else np.uint32(int(x, 0)) for x in given]
    if name == "mov.b32" and to.startswith("{"):
        low, high = to.strip("{}").replace(",", " ").split()
        registers[low], registers[high] = halves(values[0])
    else:
        registers[to] = _DONE[name](*values)


def halves(words: Words) -> tuple[Half, Half]:
    """The lower and the upper half of each word."""
    return words.astype(np.uint16), (words >> np.uint32(16)).astype(np.uint16)


def joined(low: Half, high: Half) -> Words:
    return low.astype(np.uint32) | high.astype(np.uint32) << np.uint32(16)


def as_numbers(half: Half, dtype: torch.dtype) -> torch.Tensor:
    """The numbers of a 16-bit dtype whose bits these are, in FP32."""
    return torch.from_numpy(half.astype(np.int32)).to(torch.int16).view(dtype).float()


def _bits(numbers: torch.Tensor, dtype: torch.dtype) -> Half:
    return numbers.to(dtype).view(torch.int16).numpy().view(np.uint16)


def _pairs(dtype: torch.dtype, f: Callable[..., torch.Tensor]) -> Callable[..., Words]:
    """An operation on both halves, rounded once: FP64 holds sums and products of what is given here."""

    def done(*words: Words) -> Words:
        parts = zip(*(halves(np.asarray(x)) for x in words), strict=True)
        low, high = (_bits(f(*(as_numbers(np.atleast_1d(x), dtype).double() for x in part)), dtype) for part in parts)
        return joined(low, high)

    return done


def _decoded(dtype: torch.dtype) -> Callable[[Half], Words]:
    def done(codes: Half) -> Words:
        both = torch.from_numpy(np.stack([codes & 0xFF, codes >> 8]).astype(np.uint8)).view(dtype).float()
        return joined(_bits(both[0], torch.float16), _bits(both[1], torch.float16))

    return done


def _lop3(a: Words, b: Words, c: Words, table: Words) -> Words:
    """Each bit is that of the table at the place that the bits of a, b and c are the number of."""
    place = [np.uint32(0)] * 8
    for n in range(8):
        place[n] = (a if n & 4 else ~a) & (b if n & 2 else ~b) & (c if n & 1 else ~c)
    return np.bitwise_or.reduce([x for n, x in enumerate(place) if int(table) >> n & 1])


def _prmt(a: Words, b: Words, selector: Words) -> Words:
    """Bytes of b and a, 7 to 0, that the hexadecimal digits of the selector name."""
    found = np.zeros_like(a)
    for n in range(4):
        byte = int(selector) >> (4 * n) & 7
        found |= ((b if byte > 3 else a) >> np.uint32(8 * (byte % 4)) & np.uint32(0xFF)) << np.uint32(8 * n)
    return found


def _packed(high: torch.Tensor, low: torch.Tensor) -> Words:
    return joined(_bits(low, torch.bfloat16), _bits(high, torch.bfloat16))


_DONE: dict[str, Callable[..., Any]] = {
    "mov.b32": lambda x: x,
    "shr.u32": lambda x, n: x >> n,
    "lop3.b32": _lop3,
    "prmt.b32": _prmt,
    "add.rn.f16x2": _pairs(torch.float16, lambda x, y: x + y),
    "fma.rn.bf16x2": _pairs(torch.bfloat16, lambda x, y, z: x * y + z),
    "cvt.rn.f16x2.e4m3x2": _decoded(torch.float8_e4m3fn),
    "cvt.rn.f16x2.e5m2x2": _decoded(torch.float8_e5m2),
    "cvt.f32.f16": lambda x: as_numbers(x, torch.float16),
    "cvt.rn.bf16x2.f32": _packed,
}
