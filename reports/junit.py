"""JUnit XML of a run, as CI systems read it: one suite per adapter and device, one case per record."""

from __future__ import annotations

import io
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from xml.etree import ElementTree

from .records import INCOMPLETE, Record, Verdict, describe, replace_file


def render(records: Sequence[Record]) -> bytes:
    """`failure` for what was not accepted, `error` for what could not be judged, `skipped` for declared refusals."""
    root = ElementTree.Element("testsuites", name="sacts")
    ordered = sorted(records, key=lambda r: (r.adapter, r.device, r.cell, r.replicate))
    for (adapter, device), group in groupby(ordered, key=lambda r: (r.adapter, r.device)):
        suite = ElementTree.SubElement(root, "testsuite", name=_text(f"{adapter} on {device}"))
        mine = list(group)
        for record in mine:
            _case(suite, record)
        for name, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
            suite.set(name, str(len(suite.findall(f"testcase/{tag}"))))
        suite.set("tests", str(len(mine)))
    stream = io.BytesIO()
    ElementTree.ElementTree(root).write(stream, encoding="utf-8", xml_declaration=True)
    return stream.getvalue()


def _case(suite: ElementTree.Element, record: Record) -> None:
    name = record.cell + (f"/replicate:{record.replicate}" if record.replicate else "")
    case = ElementTree.SubElement(suite, "testcase", classname=_text(record.adapter), name=_text(name))
    if record.verdict is Verdict.REFUSED:
        ElementTree.SubElement(case, "skipped", message=_text(record.status))
    elif not record.accepted:
        tag = "error" if record.verdict in INCOMPLETE else "failure"
        found = ElementTree.SubElement(case, tag, type=record.verdict, message=_text(record.sentence))
        found.text = _text(describe(record))
    elif record.verdict is not Verdict.PASS:
        ElementTree.SubElement(case, "system-out").text = _text(record.status)


def _text(text: str) -> str:
    """Characters that XML 1.0 allows; an adapter may have said anything."""
    return "".join(c if c in "\t\n" or 0x20 <= ord(c) < 0xD800 or 0xE000 <= ord(c) < 0xFFFE else "?" for c in text)


def write(path: Path, records: Sequence[Record]) -> None:
    """Write the file, renamed into place when complete."""
    replace_file(path, render(records))
