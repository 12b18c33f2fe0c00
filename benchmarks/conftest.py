"""What a benchmark aims at is told, never demanded: a time depends on what else the machine does."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

Aim = Callable[[float, float], None]


class AimMissed(UserWarning):
    """A benchmark did not reach what it aims at."""


@pytest.fixture
def aim(benchmark: BenchmarkFixture) -> Aim:
    """Keep a figure, the larger the worse, beside what it aims at; a miss is a warning."""

    def aiming(figure: float, most: float) -> None:
        benchmark.extra_info.update(figure=figure, aim=most)
        if figure > most:
            warnings.warn(f"{figure:.3g} where at most {most:.3g} is aimed at", AimMissed, stacklevel=2)

    return aiming
