"""Speed of the reference, as ratios to torch float64 SDPA with a dense mask, measured in one run.

`OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 pytest -s benchmarks`: one thread on both sides, for which the targets hold;
without the variables both use all cores. Not collected by default. Runs of both sides alternate, the fastest of each
counts. The reference's time includes reading the pages, the lists and the estimate of its own error. A target that is
missed is a warning, no failure: it has a few percent of room, and another process on the machine takes as much.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from sacts.reference.candidates import CandidateLists, ValidatedCandidates, validate
from sacts.reference.forward import Inputs, forward
from sacts.reference.paging import PagedCache, PageTable
from sacts.reference.spec import AttentionSpec, DType

ROUNDS = 15
Aim = Callable[[float, float], None]  # tells a figure beside the most that it should be


class Problem(NamedTuple):
    spec: AttentionSpec
    inputs: Inputs
    table: PageTable
    candidates: ValidatedCandidates


class Shape(NamedTuple):
    """`entries` random candidates (tokens, or blocks of `block`) in each row."""

    batch: int
    heads: tuple[int, int]
    dim: int
    qo_len: int
    seq_len: int
    entries: int
    block: int = 1


def problem_of(shape: Shape, page: int = 16) -> Problem:
    batch, (qo_heads, kv_heads), dim = shape.batch, shape.heads, shape.dim
    lengths = (shape.seq_len,) * batch, (shape.qo_len,) * batch
    spec = AttentionSpec(qo_heads, kv_heads, dim, dim, page, *lengths, DType.FP32, dim**-0.5, shape.block)
    random = np.random.default_rng(0)
    pages = -(-shape.seq_len // page)
    order = random.permutation(batch * pages).reshape(batch, pages)
    table = PageTable(order, page, batch * pages, tuple(frozenset(row.tolist()) for row in order))
    live = np.arange(batch * pages)
    k, v = (PagedCache(live, random.standard_normal((batch * pages, page, kv_heads, dim))) for _ in range(2))
    chosen = [random.permutation(shape.seq_len // shape.block)[: shape.entries] for _ in range(spec.num_rows)]
    raw = CandidateLists(np.arange(spec.num_rows + 1) * shape.entries, np.concatenate(chosen))
    inputs = Inputs(random.standard_normal((spec.num_tokens, qo_heads, dim)), k, v)
    return Problem(spec, inputs, table, validate(spec, raw, table))


def dense_torch(problem: Problem) -> Callable[[], torch.Tensor]:
    """SDPA with the mask of the lists; K and V lie contiguous already, which the reference has to do itself."""
    spec, inputs, table, candidates = problem
    seq_len = spec.seq_lens[0]
    q = torch.from_numpy(inputs.q).reshape(spec.num_requests, -1, spec.num_qo_heads, spec.head_dim_qk)
    k, v = (
        torch.from_numpy(np.stack([cache.gather(table, n, seq_len) for n in range(spec.num_requests)]))
        .transpose(1, 2)
        .contiguous()
        for cache in (inputs.k, inputs.v)
    )
    mask = torch.zeros(spec.num_rows, seq_len, dtype=torch.bool)
    rows = np.repeat(np.arange(spec.num_rows), np.diff(candidates.indptr))
    mask[torch.from_numpy(rows), torch.from_numpy(candidates.indices)] = True
    mask = mask.reshape(spec.num_requests, -1, spec.num_kv_heads, seq_len).transpose(1, 2)
    mask = mask.repeat_interleave(spec.group_size, 1).contiguous()
    q = q.transpose(1, 2).contiguous()
    return lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def seconds(run: Callable[[], object]) -> float:
    """Processor time, which does not count what else the machine does."""
    start = time.process_time()
    run()
    return time.process_time() - start


@pytest.mark.parametrize(("qo_len", "target"), [(1, 3.0), (64, 1.3)])
def test_the_reference_beside_dense_torch(benchmark: BenchmarkFixture, aim: Aim, qo_len: int, target: float) -> None:
    """B 4, 8 query and 2 KV heads, d 128, kv 4096, one key in eight."""
    problem = problem_of(Shape(4, (8, 2), 128, qo_len, 4096, 512))
    dense = dense_torch(problem)
    out = dense().transpose(1, 2).reshape(problem.inputs.q.shape).numpy()
    np.testing.assert_allclose(forward(*problem).out, out, rtol=0, atol=1e-13)
    pairs = [(seconds(dense), seconds(lambda: forward(*problem))) for _ in range(ROUNDS)]
    theirs, ours = (min(side) for side in zip(*pairs, strict=True))
    benchmark.extra_info.update(torch_ms=1e3 * theirs, reference_ms=1e3 * ours, ratio=theirs / ours)
    benchmark.pedantic(lambda: forward(*problem), rounds=5)  # type: ignore[no-untyped-call]  # pytest-benchmark is untyped
    print(f"q {qo_len}: torch {1e3 * theirs:.1f} ms, reference {1e3 * ours:.1f} ms, ratio {theirs / ours:.2f}")
    aim(ours / theirs, 1 / target)


def test_a_tiny_case_by_head_group(benchmark: BenchmarkFixture, aim: Aim) -> None:
    """q 17, kv 33, four requests of 16 query and 4 KV heads."""
    problem = problem_of(Shape(4, (16, 4), 64, 17, 33, 16))
    best = min(seconds(lambda: forward(*problem)) for _ in range(20 * ROUNDS)) / 16
    benchmark.extra_info.update(ms_per_head_group=1e3 * best)
    benchmark.pedantic(lambda: forward(*problem), rounds=50)  # type: ignore[no-untyped-call]  # pytest-benchmark is untyped
    print(f"tiny: {1e3 * best:.3f} ms a head group")
    aim(best, 0.15e-3)


def test_a_decode_of_264_pages_of_64k_tokens(benchmark: BenchmarkFixture, aim: Aim) -> None:
    problem = problem_of(Shape(1, (32, 8), 128, 1, 65536, 264, 16))
    best = min(seconds(lambda: forward(*problem)) for _ in range(ROUNDS))
    benchmark.extra_info.update(ms=1e3 * best)
    benchmark.pedantic(lambda: forward(*problem), rounds=5)  # type: ignore[no-untyped-call]  # pytest-benchmark is untyped
    print(f"64K decode: {1e3 * best:.1f} ms")
    aim(best, 0.5)
