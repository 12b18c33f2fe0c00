"""The terms of a logit and what a spec refuses to mean."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sacts.reference import scores
from sacts.reference.spec import (
    AttentionSpec,
    CandidateKind,
    CausalRule,
    Dropout,
    DType,
    Epilogue,
    EpilogueKind,
    RelativeBuckets,
    RoPE,
    RopeLayout,
)

SPEC = AttentionSpec(2, 1, 8, 8, 4, (9, 5), (2, 3), DType.FP32, 0.5)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 2**31), st.integers(0, 2**31), st.integers(0, 1000), st.sampled_from(RopeLayout))
def test_rope_keeps_lengths_and_makes_products_depend_on_the_distance_alone(
    seed: int, query: int, shift: int, layout: RopeLayout
) -> None:
    random, rope = np.random.default_rng(seed), RoPE(6, 10000.0, layout)
    q, k = random.normal(size=(2, 8))
    query %= 2**15
    a, b = (scores.rotate(q, query + s, rope) @ scores.rotate(k, 3 + s, rope) for s in (0, shift))
    assert a == pytest.approx(b, abs=1e-9)
    assert np.linalg.norm(scores.rotate(q, query, rope)) == pytest.approx(np.linalg.norm(q), rel=1e-14)
    np.testing.assert_array_equal(scores.rotate(q, query, rope)[6:], q[6:])
    np.testing.assert_array_equal(scores.rotate(q, 0, rope), q)


def test_the_two_rope_layouts_are_one_permutation_apart() -> None:
    x, order = np.arange(1.0, 9.0), [0, 2, 4, 6, 1, 3, 5, 7]
    interleaved = scores.rotate(x, 5, RoPE(8, layout=RopeLayout.INTERLEAVED))
    np.testing.assert_allclose(interleaved[order], scores.rotate(x[order], 5, RoPE(8)), rtol=1e-15)
    turned = scores.rotate(np.array([1.0, 0.0]), 1, RoPE(2))
    np.testing.assert_allclose(turned, [math.cos(1), math.sin(1)], rtol=1e-15)


def test_the_soft_cap_bounds_every_logit_and_leaves_small_ones() -> None:
    z = np.array([-1e300, -1e-9, 0.0, 1e-9, 5.0, 1e300])
    capped = scores.soft_cap(z, 5.0)
    assert capped[0] == -5
    assert capped[-1] == 5
    assert capped[4] == pytest.approx(5 * math.tanh(1), rel=1e-15)
    np.testing.assert_allclose(capped[1:4], z[1:4], rtol=1e-15)


@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (16, 128), (8, 20), (2, 5), (32, 20)])
def test_t5_buckets_are_those_of_the_published_formula(num_buckets: int, max_distance: int) -> None:
    """floor of the logarithm, away from the boundaries, where a rounded logarithm may fall on either side."""
    buckets = RelativeBuckets(scores.t5_buckets(num_buckets, max_distance), ((0.0,) * num_buckets,))
    assert len(buckets.first) == num_buckets
    exact, compared = num_buckets // 2, 0
    for distance in range(2 * max_distance):
        found = int(scores.bucket(buckets, np.array(distance)))
        if distance < exact:
            assert found == distance
            continue
        value = math.log(distance / exact) / math.log(max_distance / exact) * (num_buckets - exact)
        if abs(value - round(value)) > 1e-9 or value >= num_buckets:
            assert found == min(exact + math.floor(value), num_buckets - 1), distance
            compared += 1
    assert compared >= max_distance // 2


def test_t5_boundaries_that_are_powers_fall_into_the_upper_bucket() -> None:
    assert scores.t5_buckets(16, 128)[8:] == (8, 12, 16, 23, 32, 46, 64, 91)


@pytest.mark.parametrize(("num_buckets", "max_distance"), [(1, 10), (8, 4)])
def test_t5_buckets_without_a_range_are_refused(num_buckets: int, max_distance: int) -> None:
    with pytest.raises(ValueError, match="need 2 buckets and max_distance > num_buckets // 2"):
        scores.t5_buckets(num_buckets, max_distance)


def test_the_window_still_sees_the_key_at_its_own_distance() -> None:
    spec = replace(SPEC, causal=CausalRule.BOTTOM_RIGHT, window_left=2)
    seen = scores.visible(spec, np.array([[5]]), np.arange(9)[None])
    assert seen[0].tolist() == [t in (3, 4, 5) for t in range(9)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"causal": CausalRule.ABSOLUTE}, "query_positions must name 5 tokens, got 0"),
        ({"query_positions": (1, 2)}, "query_positions must name 5 tokens, got 2"),
        ({"query_positions": (1,) * 5, "causal": CausalRule.TOP_LEFT}, "contradict the causal rule top_left"),
        ({"query_ordinals": (1,) * 5}, "query_ordinals belong to a sequence"),
        ({"query_ordinals": (1,), "candidate_kind": CandidateKind.SEQUENCE}, "must name 5 rows, got 1"),
        ({"rope": RoPE(10)}, "rotary_dim 10 exceeds head_dim_qk 8"),
        ({"logits_soft_cap": -1.0}, "logits_soft_cap must be 0"),
        ({"alibi_slopes": (1.0,)}, "alibi_slopes must hold 2 finite values"),
        ({"sink_logits": (1.0, math.inf)}, "sink_logits must hold 2 finite values"),
        ({"buckets": RelativeBuckets((0,), ((1.0,),))}, "buckets.bias must name 2 query heads, got 1"),
        ({"dropout": Dropout(0.5, 1, (1, 2, 3))}, "request_uids must name 2 requests, got 3"),
    ],
)
def test_a_spec_without_meaning_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SPEC, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RoPE(3), "rotary_dim must be even"),
        (lambda: RoPE(4, 0.5), "base must be finite and at least 1"),
        (lambda: RelativeBuckets((1, 2), ()), "must start at 0"),
        (lambda: RelativeBuckets((0, 3, 2), ()), "never fall"),
        (lambda: RelativeBuckets((0, 3), ((1.0,),)), r"bias\[0\] must hold 2 finite values"),
        (lambda: RelativeBuckets((0,), ((1.0,),), True), r"bias\[0\] must hold 2 finite values"),
        (lambda: Dropout(1.0, 0), r"p must be in \[0, 1\)"),
        (lambda: Dropout(0.1, 2**64), "seed must be an unsigned 64-bit"),
        (lambda: Dropout(0.1, 1, (-1,)), r"request_uids\[0\]"),
        (lambda: Epilogue(EpilogueKind.CAST), "epilogue cast needs dtype"),
        (lambda: Epilogue(dtype=DType.BF16), "epilogue none has no use for dtype"),
        (lambda: Epilogue(EpilogueKind.LOW_BIT, bits=1, scale=1.0), "2 to 16 bits"),
    ],
)
def test_a_record_without_meaning_is_refused(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=message):
        make()
