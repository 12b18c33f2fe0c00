"""What `sacts doctor` looks at: versions against their bounds, devices, and the traps of Triton's interpreter."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import requires

from .environment import device_name, versions
from .worker import Worker

CELL = "decode/bf16/kv:17/pattern:all"
# Each prints True where Triton's interpreter is right; the bundled kernels work around what it gets wrong.
TRAPS = """
import torch, triton, triton.language as tl
@triton.jit
def probe(x_ptr, sum_ptr, cast_ptr, i: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, 16))
    tl.store(sum_ptr + tl.arange(0, 16), (x + x).to(tl.float32))
    tl.store(cast_ptr + tl.arange(0, 16), (x.to(tl.float32) * 1.006).to(tl.bfloat16))
x = torch.linspace(1, 2, 16).to(torch.bfloat16)
total, cast = torch.empty(16), torch.empty(16, dtype=torch.bfloat16)
probe[(1,)](x, total, cast, 0)
print(bool((total == (x + x).float()).all()), bool((cast == (x.float() * 1.006).to(torch.bfloat16)).all()))
"""


@dataclass(frozen=True)
class Sign:
    """One thing looked at; `advice` says what to do where it is not fine, or why it does not matter."""

    what: str
    seen: str
    fine: bool
    advice: str = ""


def examine() -> list[Sign]:
    """Everything, in the order in which it should be mended."""
    return [*_versions(), *_interpreter(), *_devices()]


def _number(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text.split("+")[0])[:3])


def _bounds() -> dict[str, str]:
    """Lower bounds that this distribution requires."""
    found = {}
    for requirement in requires("sacts") or []:
        match = re.match(r"([\w-]+)\s*>=\s*([\d.]+)(?!.*extra)", requirement)
        if match:
            found[match[1]] = match[2]
    return found


def _versions() -> Iterator[Sign]:
    seen = versions()
    bounds = _bounds()
    for package, version in seen.items():
        low = bounds.get(package, "")
        fine = version != "not installed" and (not low or _number(version) >= _number(low))
        yield Sign(package, version, fine, "" if fine else f"pip install '{package}>={low}'")
    if _number(seen["triton"])[:2] == (3, 6) and _number(seen["numpy"]) >= (2, 4):
        advice = "on the CPU triton 3.6 needs numpy below 2.4: pip install 'numpy<2.4', or a newer triton"
        yield Sign("triton with numpy", f"{seen['triton']} with {seen['numpy']}", False, advice)


def _interpreter() -> Iterator[Sign]:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", _as_file(TRAPS)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        yield Sign("Triton's interpreter", last[0], False, "Triton kernels cannot be judged on the CPU here")
        return
    advice = "known; the bundled kernels load bf16 as FP32 and let torch cast: do the same in yours"
    for name, right in zip(("bf16 arithmetic", "fp32 to bf16 cast"), done.stdout.split(), strict=True):
        seen = "right" if right == "True" else "wrong in Triton's interpreter"
        yield Sign(name, seen, True, "" if right == "True" else advice)


def _as_file(source: str) -> str:
    """Triton reads a kernel's source from its file: write it to one and run it."""
    return (
        "import pathlib, runpy, tempfile\n"
        "with tempfile.TemporaryDirectory() as folder:\n"
        f"    path = pathlib.Path(folder) / 'probe.py'; path.write_text({source!r}); runpy.run_path(str(path))\n"
    )


def _devices() -> Iterator[Sign]:
    import torch

    devices = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    for device in devices:
        with Worker("triton", device) as worker:
            record = worker.judge(CELL)
        advice = "" if record.accepted else f"{record.sentence}; try: sacts run -a triton -d {device} {CELL}"
        yield Sign(f"device {device}", f"{device_name(device)}: {record.verdict} on {CELL}", record.accepted, advice)
    if len(devices) == 1:
        yield Sign("GPU", "none that torch can use", True, "races and tensor-core rounding show on a GPU only")
