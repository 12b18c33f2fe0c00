"""`sacts` as a user calls it: in this process, where calls share the server of their children, or in one of its own."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

from sacts.conformance.cli import app

SACTS = [sys.executable, "-c", "from sacts.conformance.cli import main; main()"]
Done = subprocess.CompletedProcess[str]


def sacts(folder: Path, *arguments: str) -> Done:
    """The command in a folder, its exit code and what it wrote."""
    with contextlib.chdir(folder):
        done = CliRunner().invoke(app, arguments)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return Done(arguments, done.exit_code, done.stdout, done.stderr)


def sacts_apart(folder: Path, *arguments: str) -> Done:
    """The same as a process of its own."""
    return subprocess.run([*SACTS, *arguments], cwd=folder, capture_output=True, text=True, check=False, timeout=300)
