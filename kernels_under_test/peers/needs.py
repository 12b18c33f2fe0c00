"""What a peer needs to load: its package, and a GPU; and what all of them leave to others."""

from __future__ import annotations

import importlib
from typing import Any

from sacts.conformance.adapter import Refused
from sacts.reference.numerics import Numerics
from sacts.reference.spec import AttentionSpec, DType, ListsPer

from ..served import unserved

# P and out in the dtype of the inputs, FP32 between; rows are cut as the library likes. No more is documented of them.
NUMERICS = {dtype: Numerics(p=dtype, out=dtype, splits=True) for dtype in (DType.FP16, DType.BF16)}


class Missing(ImportError):
    """A peer that cannot be used here; the message says what is missing."""


def a_gpu(peer: str) -> None:
    """Raises Missing where torch sees no GPU."""
    import torch

    if not torch.cuda.is_available():
        raise Missing(f"{peer} runs on a GPU only, and torch sees none here")


def package(module: str, distribution: str) -> Any:
    """The module of a package. Raises Missing where it is not installed, or does not import."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise Missing(f"{distribution} does not import here: {error}; pip install 'sacts[peers]'") from error


def beyond(spec: AttentionSpec, *others: tuple[object, str]) -> str:
    """The first reason for which a peer leaves a spec to others, empty where there is none."""
    if reason := unserved(spec):
        return reason
    for refuses, reason in (
        (spec.dtype is DType.FP32, "dtype fp32"),
        (spec.window_left >= 0, "window_left"),
        (spec.lists is ListsPer.QUERY_HEAD, "lists per query head"),
        (spec.num_branches > 1, "branches"),
        *others,
    ):
        if refuses:
            return reason
    return ""


def refuse(reason: str) -> None:
    """Raises Refused where there is a reason."""
    if reason:
        raise Refused(reason)
