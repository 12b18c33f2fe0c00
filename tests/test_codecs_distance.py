"""Quantised caches through page tables, and the distance to the original."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from quantised_caches import (
    E4M3FN,
    E5M2,
    INT4,
    INT8,
    Array,
    cache_of,
)

from sacts.reference.candidates import CandidateLists, ValidatedCandidates, validate
from sacts.reference.codecs import error_bound
from sacts.reference.formats import decode_table
from sacts.reference.forward import Inputs, forward
from sacts.reference.paging import PagedCache, PageTable
from sacts.reference.quantised import (
    quantisation_error,
    quantise_inputs,
    reconstructed,
)
from sacts.reference.spec import AttentionSpec, CausalRule, Codec, CodecFormat, DType, ScaleGranularity

# --- through page tables, and the distance to the original


SPEC = AttentionSpec(
    num_qo_heads=4,
    num_kv_heads=2,
    head_dim_qk=6,
    head_dim_vo=5,
    page_size=4,
    seq_lens=(10, 7, 0),
    qo_lens=(2, 1, 1),
    dtype=DType.BF16,
    sm_scale=0.4,
    causal=CausalRule.BOTTOM_RIGHT,
)
# Requests 0 and 1 share page 5 as their first; request 0 also names it as its third.
SHARED = PageTable(
    np.array([[5, 2, 5], [5, 3, 9], [9, 9, 9]]), 4, 10, (frozenset({5, 2}), frozenset({5, 3}), frozenset())
)
LIVE = np.array([2, 3, 5])


def problem(seed: int = 0, offset: float = 0.0) -> tuple[Inputs, ValidatedCandidates]:
    random = np.random.default_rng(seed)
    k, v = (random.normal(size=(3, 4, 2, d)) + offset for d in (SPEC.head_dim_qk, SPEC.head_dim_vo))
    q = random.normal(size=(SPEC.num_tokens, SPEC.num_qo_heads, SPEC.head_dim_qk))
    lists = [[0, 3, 8, 5], [1, 2, 8], [9, 0, 4], [7], [6, 1], [0, 3, 5], [], []]
    raw = CandidateLists(np.cumsum([0, *map(len, lists)]), np.array([t for row in lists for t in row], np.int64))
    return Inputs(q, PagedCache(LIVE, k), PagedCache(LIVE, v)), validate(SPEC, raw, SHARED)


def attended(candidates: ValidatedCandidates, token: int, head: int) -> list[tuple[int, int, int]]:
    """Where the keys of one query head lie: (place of the page, offset, KV head)."""
    row = token * SPEC.num_kv_heads + head // SPEC.group_size
    mine = candidates.indices[slice(*candidates.indptr[row : row + 2])].tolist()
    table = SHARED.table[SPEC.token_request[token]]
    seen = [t for t in mine if t <= SPEC.token_position[token]]
    return [(LIVE.tolist().index(table[t // 4]), t % 4, head // SPEC.group_size) for t in seen]


def softmax_of(inputs: Inputs, keys: list[tuple[int, int, int]], token: int, head: int) -> tuple[Array, float, Array]:
    """out, lse and the weights of one row, one key after the other."""
    z = [SPEC.sm_scale * math.fsum((inputs.q[token, head] * inputs.k.data[key]).tolist()) for key in keys]
    lse = math.log(math.fsum(map(math.exp, z)))
    weights = np.exp(np.array(z) - lse)
    return weights @ np.array([inputs.v.data[key] for key in keys]), lse, weights


spec_codecs = pytest.mark.parametrize(
    ("k_codec", "v_codec"),
    [
        (Codec(INT8, ScaleGranularity.PAGE_HEAD), Codec(INT4, ScaleGranularity.TOKEN_HEAD, asymmetric=True)),
        (Codec(E4M3FN), Codec(E5M2, ScaleGranularity.PAGE)),
        (Codec(INT4, ScaleGranularity.PAGE_CHANNEL), None),
        (None, Codec(INT8, ScaleGranularity.CHANNEL, power_of_two=True)),
    ],
)


@spec_codecs
def test_the_distance_is_that_of_two_softmaxes_taken_key_by_key(k_codec: Codec | None, v_codec: Codec | None) -> None:
    spec = replace(SPEC, k_codec=k_codec, v_codec=v_codec)
    original, candidates = problem()
    baseline = reconstructed(original, *quantise_inputs(spec, original, SHARED))
    found = quantisation_error(spec, original, baseline, SHARED, candidates)
    for token, head in product(range(SPEC.num_tokens), range(SPEC.num_qo_heads)):
        keys = attended(candidates, token, head)
        if not keys:
            assert (found.lse[token, head], np.abs(found.out[token, head]).max()) == (0, 0)
            continue
        out, lse, _ = softmax_of(original, keys, token, head)
        right_out, right_lse, _ = softmax_of(baseline, keys, token, head)
        np.testing.assert_allclose(found.out[token, head], right_out - out, atol=1e-14)
        np.testing.assert_allclose(found.lse[token, head], right_lse - lse, atol=1e-14)
        np.testing.assert_allclose(found.baseline.out[token, head], right_out, atol=1e-14)
    assert (np.abs(found.out) > 1e-4).any()
    assert (found.lse != 0).any() == (k_codec is not None)
    assert found.largest() == (np.abs(found.out).max(), np.abs(found.lse).max())
    np.testing.assert_allclose(found.rms(), [np.sqrt((x**2).mean()) for x in (found.out, found.lse)], rtol=1e-14)


@spec_codecs
@pytest.mark.parametrize("offset", [0.0, 4.0])
def test_the_distance_stays_within_what_the_bounds_of_the_elements_allow(
    k_codec: Codec | None, v_codec: Codec | None, offset: float
) -> None:
    """lse moves by at most the largest move of a logit e; a weight by a factor within e^(+-2e); V by its own bound."""
    spec = replace(SPEC, k_codec=k_codec, v_codec=v_codec)
    original, candidates = problem(1, offset)
    k, v = quantise_inputs(spec, original, SHARED)
    found = quantisation_error(spec, original, reconstructed(original, k, v), SHARED, candidates)
    k_bound, v_bound = (
        np.zeros_like(cache.data) if codes is None else error_bound(cache.data, codes.codec, codes.scales, codes.zeros)
        for cache, codes in ((original.k, k), (original.v, v))
    )
    for token, head in product(range(3), range(4)):
        keys = attended(candidates, token, head)
        if not keys:
            continue
        _, _, weights = softmax_of(original, keys, token, head)
        logit = max(SPEC.sm_scale * float(np.abs(original.q[token, head]) @ k_bound[key]) for key in keys)
        assert abs(found.lse[token, head]) <= logit + 1e-14
        factor = math.exp(2 * logit)
        moved_v = factor * weights @ np.array([v_bound[key] for key in keys])
        moved_w = (factor - 1) * weights @ np.array([np.abs(original.v.data[key]) for key in keys])
        assert (np.abs(found.out[token, head]) <= moved_v + moved_w + 1e-13).all()


def test_values_that_the_codes_hold_cost_nothing() -> None:
    original, candidates = problem()
    for cache in (original.k, original.v):
        assert isinstance(cache, PagedCache)
        cache.data[:] = np.random.default_rng(5).integers(-127, 128, cache.data.shape) / 16
        cache.data[:, 0, :, :] = 127 / 16
    spec = replace(SPEC, k_codec=Codec(INT8), v_codec=Codec(INT8, ScaleGranularity.PAGE_CHANNEL))
    baseline = reconstructed(original, *quantise_inputs(spec, original, SHARED))
    found = quantisation_error(spec, original, baseline, SHARED, candidates)
    assert found.largest() == found.rms() == (0, 0)


def test_a_shared_page_is_read_with_its_own_scale_by_every_request_and_at_every_logical_page() -> None:
    """Scales by logical page, or of the neighbouring physical page, would give other results."""
    original, candidates = problem()
    spec = replace(SPEC, k_codec=Codec(INT8, ScaleGranularity.PAGE), v_codec=Codec(INT8, ScaleGranularity.PAGE))
    for cache in (original.k, original.v):
        assert isinstance(cache, PagedCache)
        cache.data[:] *= np.array([1.0, 8.0, 1 / 8])[:, None, None, None]
    k, v = quantise_inputs(spec, original, SHARED)
    assert k is not None
    assert v is not None
    assert len(np.unique(k.scales)) == 3
    values = v.reconstruct()
    first, third = values.read(SHARED, 0, [0, 1]), values.read(SHARED, 0, [8, 9])
    np.testing.assert_array_equal(first, third)
    np.testing.assert_array_equal(first, values.read(SHARED, 1, [0, 1]))
    right = forward(spec, reconstructed(original, k, v), SHARED, candidates)
    for changed in (replace(k, scales=np.roll(k.scales, 1, 0)), replace(k, scales=k.scales[[0, 0, 0]])):
        wrong = forward(spec, reconstructed(original, changed, v), SHARED, candidates)
        assert np.abs(wrong.lse[:3] - right.lse[:3]).max() > 1e-2


def test_the_tail_of_a_shared_page_counts_as_far_as_the_longest_request_goes() -> None:
    original, _ = problem()
    original.k.data[LIVE.tolist().index(3), 3] = 1e6  # request 1 ends at offset 3 of page 3
    spec = replace(SPEC, k_codec=Codec(INT8))
    found, _ = quantise_inputs(spec, original, SHARED)
    assert found is not None
    assert found.scales.max() < 1
    longer, _ = quantise_inputs(replace(spec, seq_lens=(10, 8, 0)), original, SHARED)
    assert longer is not None
    assert longer.scales.max() > 1000


def test_rows_out_of_range_are_left_out_of_the_summary() -> None:
    original, candidates = problem()
    original.q[0] *= 1e9
    spec = replace(SPEC, k_codec=Codec(E5M2))
    baseline = reconstructed(original, *quantise_inputs(spec, original, SHARED))
    found = quantisation_error(spec, original, baseline, SHARED, candidates)
    assert not found.in_range[0].any()
    assert found.in_range[1:].all()
    assert found.largest()[1] == np.abs(found.lse[1:]).max() < 1 < np.abs(found.lse[0]).max()
    assert np.isinf(found.own_lse[0]).all()
    assert (found.own_lse[1:] < 1e-10).all()
    nothing = found._replace(in_range=np.zeros_like(found.in_range))
    assert nothing.largest() == nothing.rms() == (0, 0)


def test_a_format_that_is_only_read_is_reconstructed_and_never_chosen() -> None:
    codec = Codec(CodecFormat.FP8_E4M3FNUZ, ScaleGranularity.PAGE)
    cache = cache_of(codec)
    assert (cache.reconstruct().data == decode_table(codec.format)[cache.codes] * cache.scales).all()
    original, _ = problem()
    with pytest.raises(ValueError, match="read, never written"):
        quantise_inputs(replace(SPEC, v_codec=codec), original, SHARED)
