"""Philox4x32-10 against the known answers of Random123, and the counter of dropout."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sacts.reference.philox import keep, philox4x32
from sacts.reference.spec import Dropout

KNOWN_ANSWERS = (  # Random123, kat_vectors: philox4x32 10, counter, key, words
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
def test_the_published_known_answers_come_out(
    counter: tuple[int, int, int, int], key: tuple[int, int], words: tuple[int, ...]
) -> None:
    assert tuple(int(word) for word in philox4x32(counter, key)) == words


def test_counters_broadcast_and_each_gives_what_it_gives_alone() -> None:
    together = philox4x32((np.arange(5)[:, None], np.arange(3), 7, 9), (1, 2))[0]
    assert together.shape == (5, 3)
    for a in range(5):
        for b in range(3):
            assert together[a, b] == philox4x32((a, b, 7, 9), (1, 2))[0]


def test_a_negative_position_is_its_word_modulo_2_to_the_32() -> None:
    assert philox4x32((-1, 0, 0, 0), (0, 0)) == philox4x32((0xFFFFFFFF, 0, 0, 0), (0, 0))


word = st.integers(0, 2**32 - 1)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(word, word, word, word, st.integers(0, 2**64 - 1), st.floats(0, 1, exclude_max=True))
def test_an_edge_is_kept_as_its_first_word_says(t: int, query: int, head: int, uid: int, seed: int, p: float) -> None:
    x0 = int(philox4x32((t, query, head, uid), (seed % 2**32, seed // 2**32))[0])
    assert bool(keep(Dropout(p, seed), t, query, head, uid)) is (x0 >= math.floor(p * 2**32))


def test_a_word_at_the_threshold_is_kept_and_one_below_it_dropped() -> None:
    x0 = int(philox4x32((5, 6, 7, 8), (9, 0))[0])
    assert keep(Dropout(x0 / 2**32, 9), 5, 6, 7, 8)
    assert not keep(Dropout((x0 + 1) / 2**32, 9), 5, 6, 7, 8)


def test_a_share_of_p_is_dropped_and_p_0_drops_nothing() -> None:
    t, query = np.arange(1000), np.arange(200)[:, None]
    share = keep(Dropout(0.3, 42), t, query, 3, 1).mean()
    assert abs(share - 0.7) < 5 * math.sqrt(0.3 * 0.7 / 200_000)
    assert keep(Dropout(0.0, 42), t, query, 3, 1).all()


def test_each_word_of_counter_and_seed_changes_the_draw() -> None:
    t = np.arange(64)
    base = keep(Dropout(0.5, 5), t, 1, 2, 3)
    for other in (
        keep(Dropout(0.5, 6), t, 1, 2, 3),
        keep(Dropout(0.5, 5 + 2**32), t, 1, 2, 3),
        keep(Dropout(0.5, 5), t + 64, 1, 2, 3),
        keep(Dropout(0.5, 5), t, 2, 2, 3),
        keep(Dropout(0.5, 5), t, 1, 3, 3),
        keep(Dropout(0.5, 5), t, 1, 2, 4),
    ):
        assert 10 < (base != other).sum() < 54
