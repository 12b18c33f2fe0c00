"""Speed of the reference's backward, as a ratio to its forward, measured in one run.

`OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 pytest -s benchmarks/test_gradient_speed.py`: one thread. Not collected by
default. Runs alternate, the least processor time of each counts. The backward's time includes what it does not take
from a forward (lse, every probability) and the sums by physical page; the third figure adds the error of every element
of d_k and d_v, by position and by page, spelled out. A target that is missed is a warning, no failure.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray
from pytest_benchmark.fixture import BenchmarkFixture

from sacts.reference.candidates import CandidateLists, ValidatedCandidates, validate
from sacts.reference.forward import Inputs, forward
from sacts.reference.gradients import Gradients, backward
from sacts.reference.paging import PagedCache, PageTable
from sacts.reference.spec import AttentionSpec, Dropout, DType, RoPE

ROUNDS = 9
Aim = Callable[[float, float], None]  # tells a figure beside the most that it should be
BATCH, HEADS, DIM, SEQ_LEN, PAGE = 4, (8, 2), 128, 4096, 16


class Problem(NamedTuple):
    spec: AttentionSpec
    inputs: Inputs
    table: PageTable
    candidates: ValidatedCandidates


def problem_of(qo_len: int, entries: int, **terms: object) -> Problem:
    """`entries` random tokens in each row."""
    lengths = (SEQ_LEN,) * BATCH, (qo_len,) * BATCH
    spec = AttentionSpec(*HEADS, DIM, DIM, PAGE, *lengths, DType.FP32, DIM**-0.5, **terms)  # type: ignore[arg-type]  # terms by field name
    random, pages = np.random.default_rng(0), SEQ_LEN // PAGE
    order = random.permutation(BATCH * pages).reshape(BATCH, pages)
    table = PageTable(order, PAGE, BATCH * pages, tuple(frozenset(row.tolist()) for row in order))
    live = np.arange(BATCH * pages)
    k, v = (PagedCache(live, random.standard_normal((BATCH * pages, PAGE, HEADS[1], DIM))) for _ in range(2))
    chosen = [random.permutation(SEQ_LEN)[:entries] for _ in range(spec.num_rows)]
    raw = CandidateLists(np.arange(spec.num_rows + 1) * entries, np.concatenate(chosen))
    inputs = Inputs(random.standard_normal((spec.num_tokens, HEADS[0], DIM)), k, v)
    return Problem(spec, inputs, table, validate(spec, raw, table))


def seconds(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def with_pages(problem: Problem, d_out: NDArray[np.float64]) -> Gradients:
    found = backward(*problem, d_out)
    assert np.array_equal(found.d_k.pages.cache.pages, found.d_v.pages.cache.pages)
    return found


def with_errors(problem: Problem, d_out: NDArray[np.float64]) -> Gradients:
    found = with_pages(problem, d_out)
    assert np.array_equal(found.d_k.page_errors.cache.pages, found.d_v.page_errors.cache.pages)
    return found


@pytest.mark.parametrize(
    ("qo_len", "entries", "terms"),
    [
        pytest.param(64, 512, {}, id="K512"),
        pytest.param(64, 512, {"rope": RoPE(DIM), "logits_soft_cap": 30.0}, id="K512-rope-cap"),
        pytest.param(64, 512, {"dropout": Dropout(0.1, 1)}, id="K512-dropout"),
        pytest.param(64, 128, {}, id="K128"),
        pytest.param(1, 512, {}, id="decode-K512"),
    ],
)
def test_backward_beside_forward(
    benchmark: BenchmarkFixture,
    aim: Aim,
    qo_len: int,
    entries: int,
    terms: dict[str, object],
    request: pytest.FixtureRequest,
) -> None:
    """B 4, 8 query and 2 KV heads, d 128, kv 4096; the target holds for q 64 and K 512, the others are shown."""
    problem = problem_of(qo_len, entries, **terms)
    d_out = np.random.default_rng(1).standard_normal((*problem.inputs.q.shape[:2], DIM))
    runs: tuple[Callable[[], object], ...] = (
        lambda: forward(*problem),
        lambda: with_pages(problem, d_out),
        lambda: with_errors(problem, d_out),
    )
    once, bare, whole = (1e3 * min(side) for side in zip(*(map(seconds, runs) for _ in range(ROUNDS)), strict=True))
    benchmark.extra_info.update(forward_ms=once, backward_ms=bare, with_errors_ms=whole, ratio=bare / once)
    benchmark.pedantic(runs[1], rounds=3)  # type: ignore[no-untyped-call]  # pytest-benchmark is untyped
    name = request.node.callspec.id
    print(
        f"{name}: forward {once:.1f} ms, backward {bare:.1f} ms ({bare / once:.2f}x), "
        f"with errors {whole:.1f} ms ({whole / once:.2f}x)"
    )
    if name.startswith("K512"):
        aim(bare / once, 3.0)
