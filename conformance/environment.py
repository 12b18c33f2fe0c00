"""What a run ran on: versions and the device, nothing that names a machine or a person."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("sacts", "torch", "triton", "numpy", "pytest", "pytest-xdist", "msgspec")


def versions() -> dict[str, str]:
    """Installed version of each package that matters; `not installed` for a missing one."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def device_name(device: str) -> str:
    """The device in words: the GPU's name, or the processor's architecture; `device` itself where nothing is known."""
    if device == "cpu":
        return f"CPU ({platform.machine()}), Triton in its interpreter"
    import torch

    if device.startswith("cuda") and torch.cuda.is_available():
        return f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"
    return device


def environment(device: str) -> dict[str, str]:
    """Versions, operating system and device of this run."""
    return {**versions(), "system": platform.system(), "device": device_name(device)}
