"""No bound where a declared format cannot hold what goes through it; P in FP8 that may be divided by l first."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from term_problems import SPECS, Problem, problem_of
from test_bound_formulas import Row, evaluated

from sacts.conformance.build import build
from sacts.conformance.gates.generic import drawn
from sacts.matrices.cell import parse
from sacts.reference.bounds import expected
from sacts.reference.numerics import Numerics
from sacts.reference.spec import CodecFormat, DType

E4M3 = CodecFormat.FP8_E4M3FN
FP32 = Numerics(DType.FP32, DType.FP32)


def trusted(problem: Problem, numerics: Numerics) -> NDArray[np.bool_]:
    """Rows without an edge are exact, whatever the formats."""
    return expected(problem.spec, problem.inputs, problem.table, problem.lists, numerics).trusted


@pytest.mark.parametrize(
    ("spec", "holds", "overflows"),
    [
        ("plain", {"p": E4M3, "p_offset": 8}, {"p": E4M3, "p_offset": 9}),
        ("plain", {"p": E4M3, "p_offset": 0, "lag": 8}, {"p": E4M3, "p_offset": 1, "lag": 8}),
        ("dropout", {"p": E4M3, "p_offset": 8}, {"p": E4M3, "p_offset": 9}),
    ],
)
def test_p_that_its_format_cannot_hold_has_no_bound(
    spec: str, holds: dict[str, object], overflows: dict[str, object]
) -> None:
    """The largest of e4m3 is 448: 2^8 is held, also over 1 - 0.3, and 2^9 is not."""
    problem = problem_of(replace(SPECS[spec], dtype=DType.FP32), 0, 0.1)
    assert trusted(problem, replace(FP32, **holds)).mean() > 0.9  # type: ignore[arg-type]  # by field name
    assert trusted(problem, replace(FP32, **overflows)).mean() < 0.5  # type: ignore[arg-type]  # by field name


@pytest.mark.parametrize(("spec", "field"), [("RoPE", "rotated"), ("int8 KV", "reconstructed")])
def test_keys_beyond_fp16_have_no_bound_where_they_are_rounded_to_it(spec: str, field: str) -> None:
    problem = problem_of(replace(SPECS[spec], dtype=DType.FP32), 0, 1.0)
    k = problem.inputs.k
    large = replace(problem, inputs=problem.inputs._replace(q=1e-6 * problem.inputs.q, k=replace(k, data=1e5 * k.data)))
    fp16, fp32 = (replace(FP32, **{field: dtype}) for dtype in (DType.FP16, DType.FP32))  # type: ignore[arg-type]  # as above
    assert trusted(large, fp32).mean() > 0.9
    assert trusted(large, fp16).mean() < trusted(large, fp32).mean()
    assert trusted(problem, fp16).mean() > 0.9


def test_p_in_fp8_that_may_be_divided_by_l_first_loses_its_subnormals_in_full() -> None:
    random = np.random.default_rng(3)
    row = Row(random.normal(size=24), 0.01 * random.normal(size=(70, 24)), 0.3 + random.normal(size=(70, 5)))
    whole, before = (evaluated(row, 70, Numerics(E4M3, DType.FP32, unit_p=unit)) for unit in (True, False))
    l = 70.0  # of nearly equal logits
    lost = 2.0**-10 * np.abs(row.v).sum(axis=0)  # half the smallest subnormal of e4m3
    np.testing.assert_allclose((before.half_width - whole.half_width)[0, 0], lost * (1 - 1 / l), rtol=1e-2)


def test_no_drawn_gate_behind_a_soft_cap() -> None:
    assert drawn(build(parse("decode/fp16/kv:60")))
    assert not drawn(build(parse("decode/fp16/kv:60/cap:20")))
