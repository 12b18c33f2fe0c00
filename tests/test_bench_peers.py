"""Peers as adapters: right where they can run, refusals in words elsewhere, and how their arguments are made."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import fake_peers
import pytest
import torch

from sacts.conformance.adapter import Backend
from sacts.conformance.bench import scenarios
from sacts.conformance.bench.child import Order, Timer
from sacts.conformance.loading import AdapterError, load
from sacts.kernels_under_test.peers import PEERS, dense, fla_nsa, flash_sparse, flashinfer, flex, gathered
from sacts.reports.records import Verdict

WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="asks what happens without a GPU")
PLAIN = [name for name, each in scenarios.SCENARIOS.items() if each.codec is None and "-32k" not in name]


def verdict(adapter: Any, name: str) -> tuple[Verdict, str]:
    row = Timer("peer", Backend(adapter), "cpu").row(Order(name, tiny=True, seconds=0.01))
    return row.verdict, row.sentence


@pytest.mark.parametrize("name", PLAIN)
def test_gather_and_sdpa_is_right_in_every_plain_scenario(name: str) -> None:
    assert verdict(gathered.Adapter(), name) == (Verdict.PASS, "")


@pytest.mark.parametrize("name", PLAIN)
def test_dense_sdpa_is_right_over_contiguous_kv_and_refuses_the_rest(name: str) -> None:
    contiguous = not scenarios.SCENARIOS[name].tiny.page_size
    expected = (Verdict.PASS, "") if contiguous else (Verdict.REFUSED, "KV that is not contiguous")
    assert verdict(dense.Adapter(), name) == expected


def test_gather_and_sdpa_takes_units_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathered, "COPIED_BYTES", 1)
    assert verdict(gathered.Adapter(), "prefill-per-token") == (Verdict.PASS, "")


@WITHOUT_GPU
@pytest.mark.parametrize("name", ["flashinfer", "flashinfer-tensor-cores", "flash-sparse-attn", "fla-nsa", "flex"])
def test_a_peer_that_needs_a_gpu_says_so(name: str) -> None:
    with pytest.raises(AdapterError, match="runs on a GPU only, and torch sees none here"):
        load(PEERS[name])


def test_a_peer_that_is_not_installed_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fla_nsa, "a_gpu", lambda peer: None)
    with pytest.raises(ImportError, match=r"fla-core does not import here: .*pip install 'sacts\[peers\]'"):
        fla_nsa.Adapter()


FLASHINFER = {
    "decode-pages": "",
    "decode-pages-head": "",
    "decode-blocks": "",
    "decode-tokens": "",
    "decode-one": "",
    "decode-ragged": "",
    "decode-fp8-tensor": "",
    "prefill-16k": "",
    "prefill-16k-paged": "",
    "decode-fp8-head": "codec fp8_e4m3fn per head",
    "decode-int8-tensor": "codec int8 per tensor",
    "prefill-per-token": "causal bottom_right over selected pages",
}


@pytest.mark.parametrize("name", FLASHINFER)
def test_page_lists_for_flashinfer_name_what_is_attended(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(flashinfer, "a_gpu", lambda peer: None)
    monkeypatch.setattr(flashinfer, "package", lambda *names: fake_peers)
    monkeypatch.setattr(flashinfer, "WORKSPACE", 1)
    reason = FLASHINFER[name]
    assert verdict(flashinfer.Adapter(), name) == (Verdict.REFUSED if reason else Verdict.PASS, reason)


FLASH_SPARSE = {
    "decode-tokens-16k": "",
    "decode-tokens": "KV that is not contiguous",
    "decode-pages": "block_size 16: it gathers tokens",
}


@pytest.mark.parametrize("name", FLASH_SPARSE)
def test_tokens_for_flash_sparse_attn_name_what_is_attended(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(flash_sparse, "a_gpu", lambda peer: None)
    monkeypatch.setattr(flash_sparse, "package", lambda *names: fake_peers)
    monkeypatch.setattr(flash_sparse, "STUBS", {})
    reason = FLASH_SPARSE[name]
    assert verdict(flash_sparse.Adapter(), name) == (Verdict.REFUSED if reason else Verdict.PASS, reason)


def test_blocks_for_nsa_name_what_is_attended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fla_nsa, "a_gpu", lambda peer: None)
    monkeypatch.setattr(fla_nsa, "package", lambda *names: fake_peers)
    monkeypatch.setattr(fla_nsa, "LEAST_GROUP", 1)
    assert verdict(fla_nsa.Adapter(), "prefill-per-token") == (Verdict.PASS, "")
    assert verdict(fla_nsa.Adapter(), "prefill-16k") == (Verdict.REFUSED, "causal none")


@pytest.mark.parametrize("name", ["decode-blocks", "prefill-16k"])
@pytest.mark.parametrize("shared", [True, False])
def test_blocks_for_flex_attention_name_what_is_attended(
    monkeypatch: pytest.MonkeyPatch, name: str, shared: bool
) -> None:
    monkeypatch.setattr(flex, "a_gpu", lambda peer: None)
    monkeypatch.setattr(flex, "LEAST_BLOCK", 16)
    monkeypatch.setattr(flex, "QUERY_BLOCK", 16)
    monkeypatch.setitem(scenarios.SCENARIOS, name, replace(scenarios.SCENARIOS[name], shared=shared))
    adapter = flex.Adapter()
    monkeypatch.setattr(adapter, "_block_mask", fake_peers.BlockMask)
    monkeypatch.setattr(adapter, "_attend", fake_peers.flex_attention)
    assert verdict(adapter, name) == (Verdict.PASS, "")


def test_the_stand_ins_have_the_names_that_flex_attention_has() -> None:
    from inspect import signature

    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    real = signature(BlockMask.from_kv_blocks).parameters
    assert list(real)[:4] == ["kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"]
    assert {"BLOCK_SIZE", "seq_lengths"} <= real.keys()
    assert {"block_mask", "scale", "enable_gqa", "kernel_options"} <= signature(flex_attention).parameters.keys()
