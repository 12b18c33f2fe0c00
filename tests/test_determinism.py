"""The same id gives the same data: in another process, under another hash seed, on another machine."""

from __future__ import annotations

import os
import subprocess
import sys

from sacts.conformance.build import build
from sacts.conformance.draw import Draw
from sacts.matrices.cell import parse

DIGEST = """
from hashlib import blake2b
from sacts.conformance.build import build
from sacts.conformance.probes.inputs import COUNT, RANDOM
from sacts.matrices import tiers
state = blake2b(digest_size=8)
for cell in tiers.load(tiers.path_of("smoke")):
    problem = build(cell)
    lists = problem.raw.indptr, problem.raw.indices, problem.candidates.indices
    for array in (*lists, problem.table.table, problem.pages):
        state.update(array.astype("<i8").tobytes())
    for probe in (RANDOM, COUNT):
        q, k, v, _ = probe.inputs(problem)
        for array in (q, k.data, v.data):
            state.update(array.astype("<f8").tobytes())
print(state.hexdigest())
"""


def digest(hash_seed: str) -> str:
    environment = os.environ | {"PYTHONHASHSEED": hash_seed}
    return subprocess.run(
        [sys.executable, "-c", DIGEST], env=environment, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_the_smoke_tier_has_the_same_data_everywhere() -> None:
    assert digest("1") == digest("2") == "40ddc49fe7791d88"


def test_replicates_cells_and_purposes_draw_apart() -> None:
    cell = parse("decode/fp16/kv:300")
    first, second = build(cell).candidates.indices, build(cell, replicate=1).candidates.indices
    assert first.tolist() != second.tolist()
    assert Draw("a", "b").permutation(9).tolist() == Draw("a", "b").permutation(9).tolist()
    assert Draw("a", "b").permutation(9).tolist() != Draw("b", "a").permutation(9).tolist()


def test_normal_draws_have_the_moments_of_a_normal() -> None:
    x = Draw("moments").normal((200_000,))
    assert abs(x.mean()) < 0.01
    assert abs(x.std() - 1) < 0.01
    assert abs((x**4).mean() - 2.9) < 0.1  # twelve uniforms: kurtosis 3 - 1.2 / 12
