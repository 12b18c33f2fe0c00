"""A device that several processes share: whether it still answers, and memory that others hold for a while."""

from __future__ import annotations

import contextlib
import gc

from sacts.reports.records import Record, Verdict

WAITS = (1.0, 2.0, 4.0, 8.0, 16.0, 16.0, 16.0)  # seconds, before a cell that found no memory is judged again
CROWDED = f"no memory for {sum(WAITS):g} s: if others hold it, try fewer processes (-n)"
HELD = 2**30  # bytes that torch may keep for itself behind a cell


def device_is_sound(device: str) -> bool:
    """Whether the device still answers; one illegal access poisons a CUDA context for the rest of the process."""
    if not device.startswith("cuda"):
        return True
    import torch

    try:
        torch.cuda.synchronize(device)
        torch.zeros(1, device=device).cpu()
    except RuntimeError:
        return False
    return True


def crowded(record: Record) -> bool:
    """Whether the device had no memory left for this cell: CUDA, torch and Triton say so in the same words."""
    lost = record.verdict in (Verdict.ERROR, Verdict.SUITE_ERROR)
    return lost and record.device.startswith("cuda") and "out of memory" in record.sentence


def release(device: str) -> None:
    """Give the memory of ended launches back, where it is much, so that other processes find some; of a device that
    answers no more nothing.
    """
    if not device.startswith("cuda"):
        return
    import torch

    with contextlib.suppress(RuntimeError):  # whether the device is sound is asked behind each cell
        if torch.cuda.memory_reserved(device) > HELD:
            gc.collect()
            torch.cuda.empty_cache()
