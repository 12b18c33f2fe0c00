"""One localisation in a process of its own, as `python -m sacts.conformance.localise.child FD ADAPTER DEVICE CELL
REPLICATE BUDGET`: a backend that crashes or hangs ends this process only.

Writes one JSON object to file descriptor FD; what the adapter prints goes to standard error.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import msgspec

from sacts.matrices.cell import Cell, parse
from sacts.reports.records import Finding

from .launches import BUDGET

SECONDS = 600.0


class Answer(msgspec.Struct):
    """What was found. `finding` None: nothing is wrong, or it could not be judged, and `problem` says why. `launches`:
    extra ones, beyond the two that look for a failure.
    """

    finding: Finding | None = None
    launches: int = 0
    problem: str = ""


def ask(
    adapter: str, device: str, cell: Cell, replicate: int = 0, budget: int = BUDGET, seconds: float = SECONDS
) -> Answer:
    """Locate in a child process."""
    read, write = os.pipe()
    environment = dict(os.environ)
    environment.pop("TRITON_INTERPRET", None)
    if device == "cpu":
        environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    arguments = [str(write), adapter, device, cell.id, str(replicate), str(budget)]
    command = [sys.executable, "-m", "sacts.conformance.localise.child", *arguments]
    with os.fdopen(read, "rb") as replies:
        try:
            done = subprocess.run(
                command,
                pass_fds=(write,),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                timeout=seconds,
            )
        except subprocess.TimeoutExpired:
            return Answer(problem=f"the localisation took over {seconds:g} s")
        finally:
            os.close(write)
        said = replies.read()
    if said:
        return msgspec.json.decode(said, type=Answer)
    code = done.returncode
    cause = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    return Answer(problem=f"a launch ended the process with {cause}{f' ({lines[-1]})' if lines else ''}")


def _answer(adapter: str, device: str, cell: str, replicate: int, budget: int) -> Answer:
    from ..adapter import Refused, Scale
    from ..build import build
    from ..launch import AdapterRaised, ContractBroken, Launcher
    from ..loading import AdapterError, load
    from .locate import locate

    try:
        launcher = Launcher(load(adapter), device)
        capabilities = launcher.backend.capabilities
        own_scale = capabilities.scale is Scale.DEFAULT
        problem = build(parse(cell), replicate, default_scale=own_scale, causal_rule=capabilities.causal)
        found = locate(launcher, problem, budget=budget)
    except ContractBroken as broken:
        return Answer(broken.finding)
    except Refused as refusal:
        return Answer(problem=f"refused: {refusal}")
    except AdapterRaised as raised:
        return Answer(problem=f"{raised} raised {type(raised.__cause__).__name__}: {raised.__cause__}")
    except AdapterError as error:
        return Answer(problem=str(error))
    return Answer(found.finding, found.launches) if found else Answer()


def main() -> None:
    """Answer the parent over the descriptor that it passed."""
    fd, adapter, device, cell, replicate, budget = sys.argv[1:]
    os.dup2(2, 1)
    with os.fdopen(int(fd), "wb") as replies:
        replies.write(msgspec.json.encode(_answer(adapter, device, cell, int(replicate), int(budget))))


if __name__ == "__main__":
    main()
