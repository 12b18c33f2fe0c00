"""Softmax by parts: running states, merges in any tree, and states without mass."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sacts.reference.softmax import State, finish, merge, merge_all, tile_state, trace

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
