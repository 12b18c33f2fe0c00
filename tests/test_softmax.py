"""Softmax by parts: running states, merges in any tree, and states without mass."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sacts.reference.softmax import State, finish, merge, merge_all, tile_state, trace, with_sink

masks = st.lists(st.booleans(), min_size=1, max_size=40)


def row_of(mask: list[bool], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Logits [2, n] of two query heads, -inf where the mask is False, and V [n, 3]."""
    random = np.random.default_rng(seed)
    logits = np.where(mask, 20 * random.normal(size=(2, len(mask))), -np.inf)
    return logits, random.normal(size=(len(mask), 3))


def assert_same_result(found: State, expected: State) -> None:
    for a, b in zip(finish(found), finish(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-13, atol=1e-14)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(masks, st.integers(1, 48), st.integers(0, 99))
def test_running_states_end_where_one_tile_does(mask: list[bool], kv_tile: int, seed: int) -> None:
    logits, v = row_of(mask, seed)
    local, running = trace(logits, v, kv_tile)
    assert len(local) == len(running) == -(-len(mask) // kv_tile)
    assert_same_result(running[-1], tile_state(logits, v))
    for tile, state in enumerate(running):
        end = (tile + 1) * kv_tile
        assert_same_result(state, tile_state(logits[:, :end], v[:end]))
        assert (state.m == logits[:, :end].max(axis=-1)).all()


@settings(max_examples=150, deadline=None, derandomize=True)
@given(masks, st.integers(0, 99), st.data())
def test_merging_in_any_tree_gives_the_whole_and_empty_states_carry_nothing(
    mask: list[bool], seed: int, data: st.DataObject
) -> None:
    logits, v = row_of(mask, seed)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(mask)), max_size=6)))
    states = [tile_state(logits[:, a:b], v[a:b]) for a, b in zip([0, *cuts], [*cuts, len(mask)], strict=True)]
    for junk in data.draw(st.lists(st.sampled_from((np.nan, np.inf, -np.inf, 1e300, -1e300, 0.0)), max_size=4)):
        empty = State(np.full(2, junk), np.zeros(2), np.full((2, 3), data.draw(st.sampled_from((np.nan, np.inf, 0.0)))))
        states.insert(data.draw(st.integers(0, len(states))), empty)
    while len(states) > 1:
        a = states.pop(data.draw(st.integers(0, len(states) - 1)))
        b = states.pop(data.draw(st.integers(0, len(states) - 1)))
        with np.errstate(invalid="ignore"):
            states.append(merge(a, b))
    assert_same_result(states[0], tile_state(logits, v))


def test_a_state_without_mass_ends_as_an_empty_row_whatever_it_holds() -> None:
    out, lse = finish(State(np.array([np.nan, 1e300]), np.zeros(2), np.array([[np.nan], [np.inf]])))
    assert out.tolist() == [[0.0], [0.0]]
    assert lse.tolist() == [-np.inf, -np.inf]


def test_merge_all_of_nothing_but_empty_states_is_an_empty_row() -> None:
    junk = [State(np.array(m), np.array(0.0), np.array([np.nan])) for m in (np.nan, np.inf, 1e300)]
    out, lse = finish(merge_all(junk))
    assert out.tolist() == [0.0]
    assert lse == -np.inf


@settings(max_examples=100, deadline=None, derandomize=True)
@given(masks, st.integers(0, 99), st.data())
def test_merging_is_associative_and_commutative(mask: list[bool], seed: int, data: st.DataObject) -> None:
    logits, v = row_of(mask, seed)
    first, second = sorted(data.draw(st.tuples(*[st.integers(0, len(mask))] * 2)))
    parts = slice(0, first), slice(first, second), slice(second, None)
    a, b, c = (tile_state(logits[:, part], v[part]) for part in parts)
    for other in (merge(a, merge(b, c)), merge(merge(c, a), b), merge_all((c, b, a))):
        assert_same_result(other, merge(merge(a, b), c))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(masks, st.integers(0, 99), st.floats(-1e5, 1e5))
def test_a_shift_of_all_logits_moves_lse_by_it_and_nothing_else(mask: list[bool], seed: int, shift: float) -> None:
    logits, v = row_of(mask, seed)
    (out, lse), (shifted_out, shifted_lse) = (finish(tile_state(z, v)) for z in (logits, logits + shift))
    np.testing.assert_allclose(shifted_out, out, rtol=0, atol=1e-10)
    np.testing.assert_allclose(shifted_lse, lse + shift, rtol=0, atol=1e-10)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(masks, st.integers(0, 99), st.floats(-60, 60), st.data())
def test_a_sink_is_one_more_key_without_a_value_wherever_the_splits_are(
    mask: list[bool], seed: int, sink: float, data: st.DataObject
) -> None:
    logits, v = row_of(mask, seed)
    cut = data.draw(st.integers(0, len(mask)))
    merged = with_sink(merge(tile_state(logits[:, :cut], v[:cut]), tile_state(logits[:, cut:], v[cut:])), sink)
    extended = np.concatenate((logits, np.full((2, 1), sink)), axis=1)
    assert_same_result(merged, tile_state(extended, np.concatenate((v, np.zeros((1, 3))))))


def test_the_sink_of_an_empty_row_is_its_lse() -> None:
    out, lse = finish(with_sink(State(np.array([np.nan]), np.zeros(1), np.array([[np.nan]])), -3.5))
    assert out.tolist() == [[0.0]]
    assert lse.tolist() == [-3.5]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(masks, st.integers(0, 99), st.integers(0, 40))
def test_dropout_scales_the_numerator_and_leaves_the_denominator(mask: list[bool], seed: int, cut: int) -> None:
    logits, v = row_of(mask, seed)
    kept = (np.random.default_rng(seed).random(logits.shape) < 0.6) / 0.6
    whole = tile_state(logits, v, kept)
    parts = (tile_state(logits[:, s], v[s], kept[:, s]) for s in (slice(0, cut), slice(cut, None)))
    assert_same_result(merge_all(parts), whole)
    plain = tile_state(logits, v)
    np.testing.assert_array_equal(whole.l, plain.l)
    p = np.where(np.isfinite(logits), np.exp(logits - np.where(np.isfinite(plain.m), plain.m, 0.0)[:, None]), 0.0)
    np.testing.assert_allclose(whole.o, (p * kept) @ v, rtol=1e-13, atol=1e-13)


def test_batches_with_values_of_their_own_are_what_each_is_alone() -> None:
    random = np.random.default_rng(3)
    logits, v = random.normal(size=(3, 2, 4, 7)), random.normal(size=(3, 7, 5))
    logits[0, :, :, 2], v[0, 2] = -np.inf, np.nan
    logits[1, 1, 0] = -np.inf
    together = tile_state(logits, v)
    for b in range(3):
        assert_same_result(State(*(x[b] for x in together)), tile_state(logits[b], v[b]))
    assert together.l[1, 1, 0] == 0
