"""Find an adapter by entry point name, `module:attribute`, or `path/to/file.py[:attribute]`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from difflib import get_close_matches
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from .adapter import Backend

GROUP = "sacts.adapters"


class AdapterError(ValueError):
    """An adapter that cannot be found or loaded; the message says what was tried."""


def names() -> list[str]:
    """The adapters that are installed, by entry point name."""
    return sorted({point.name for point in entry_points(group=GROUP)})


def check(name: str) -> None:
    """Raise AdapterError, with the nearest name, for a text that can name no adapter; imports no adapter."""
    if name in names():
        return
    target, _, attribute = name.partition(":")
    if target.endswith(".py"):
        if not Path(target).is_file():
            raise AdapterError(f"adapter {name!r}: there is no file {target}")
        return
    if attribute:
        if str(Path.cwd()) not in sys.path:
            sys.path.append(str(Path.cwd()))  # a console script does not look into the user's folder
        try:
            found = importlib.util.find_spec(target)
        except (ImportError, ValueError):
            found = None
        if found is None:
            raise AdapterError(f"adapter {name!r}: there is no module {target}")
        return
    near = get_close_matches(name, names(), n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise AdapterError(
        f"no adapter {name!r}; {hint}installed: {', '.join(names())}; or give module:attribute or path/to/file.py"
    )


def load(name: str) -> Backend:
    """The backend that `name` names; a class is instantiated without arguments. Raises AdapterError."""
    check(name)
    try:
        found = _find(name)
        return Backend(found() if isinstance(found, type) else found)
    except Exception as error:  # whatever a vendor's module raises while it loads is that adapter's fault, and is named
        raise AdapterError(f"adapter {name!r} did not load: {type(error).__name__}: {error}") from error


def _find(name: str) -> Any:
    for point in entry_points(group=GROUP):
        if point.name == name:
            return point.load()
    target, _, attribute = name.partition(":")
    if target.endswith(".py"):
        path = Path(target).resolve()
        spec = importlib.util.spec_from_file_location(f"sacts_adapter_{path.stem}", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        if not attribute:
            return getattr(module, "Adapter", module)
    else:
        module = importlib.import_module(target)
    return getattr(module, attribute)
