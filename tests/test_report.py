"""The page and the JUnit file of a run: complete, escaped, readable without colour."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

from sacts.matrices.cell import axis_values
from sacts.reports import html, junit
from sacts.reports.records import PROVES, Finding, Gate, ProbeResult, Record, Strip, Verdict, blank

EVIL = "<script>alert(1)</script>"
STRIP = Strip(first=[0, 4], step=4, observed=[0.5, 0.0], expected=[0.25, 0.25], elsewhere=0.5)


def record(verdict: Verdict, adapter: str = "mine", sentence: str = "", strip: Strip | None = None) -> Record:
    made = blank(adapter, "cpu", "decode/fp16/kv:17/pattern:all", 0, verdict, sentence)
    finding = Finding(Gate.COUNT, "row", sentence, 3.0, strip) if strip else None
    known = {name: getattr(made, name) for name in made.__struct_fields__}
    return Record(**known | {"finding": finding, "use": {"out": 0.5}, "gates": {"out": "pass"}})


EVERY = [record(verdict, f"adapter {verdict}") for verdict in Verdict]
FAILED = record(Verdict.FAIL, EVIL, f"token 3 missing {EVIL}", STRIP)


class Page(HTMLParser):
    """Tags, and the text outside of scripts and styles."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self.links: list[str] = []
        self._inside = ""
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._inside = tag
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        self.text += "" if self._inside in ("script", "style") else data


def page(*records: Record) -> tuple[str, Page]:
    source = html.render(records, {"sacts": "0.1.0", "device": EVIL}, axis_values)
    return source, Page(source)


def test_what_an_adapter_says_is_shown_as_text() -> None:
    source, seen = page(FAILED)
    assert seen.tags.count("script") == 1
    assert f"token 3 missing {EVIL}" in seen.text
    assert EVIL not in source


def test_the_page_needs_no_network() -> None:
    source, seen = page(FAILED, *EVERY)
    assert not seen.links
    assert not re.search(r"https?://|@import|url\(", source)


def test_every_verdict_has_a_letter_of_its_own_and_is_counted() -> None:
    assert set(html.SIGNS) == set(Verdict)
    assert len(set(html.SIGNS.values())) == len(Verdict)
    _, seen = page(*EVERY)
    for verdict in Verdict:
        assert f"{html.SIGNS[verdict]} {verdict}: 1" in seen.text
    assert "10 cells judged, 7 not accepted" in " ".join(seen.text.split())


def test_the_headline_is_the_exit_code_in_words() -> None:
    for verdict, word in ((Verdict.PASS, "accepted"), (Verdict.FAIL, "not accepted"), (Verdict.NOT_RUN, "incomplete")):
        assert f"Sparse attention conformance: {word}\n" in page(record(verdict))[1].text


def test_a_failure_shows_its_sentence_its_strip_and_its_reproducer() -> None:
    source, seen = page(FAILED)
    assert "sacts run --adapter" in seen.text
    assert "weight outside the row's own tokens: 0.5" in seen.text
    assert "token 4 to 7: weight 0, expected 0.25" in seen.text
    assert source.count('class="frame"') == 2


def test_bars_are_wrong_only_where_the_weights_differ() -> None:
    right = Strip([0, 1], 1, [0.5, 0.499], [0.5, 0.5])
    assert [bar.wrong for bar in html.bars(right)] == [False, False]
    assert [bar.wrong for bar in html.bars(STRIP)] == [True, True]


def test_the_page_says_what_each_probe_proves_and_where_it_was_untrusted() -> None:
    told = {"dither": ProbeResult("untrusted", "1 of 4"), "comb": ProbeResult("not applicable")}
    known = {name: getattr(FAILED, name) for name in FAILED.__struct_fields__}
    _, seen = page(Record(**known | {"probes": told}))
    assert PROVES["dither"] in seen.text
    assert "1 untrusted" in seen.text
    assert "dither untrusted in 1 of 4 rows, comb not applicable" in seen.text


def test_the_heat_map_knows_every_axis() -> None:
    _, seen = page(FAILED)
    assert seen.tags.count("option") == 2 * len(axis_values(FAILED.cell))


def test_junit_counts_what_it_holds(tmp_path: Path) -> None:
    junit.write(tmp_path / "junit.xml", [*EVERY, FAILED])
    root = ElementTree.parse(tmp_path / "junit.xml").getroot()
    totals = {
        name: sum(int(suite.get(name, "")) for suite in root) for name in ("tests", "failures", "errors", "skipped")
    }
    assert totals == {"tests": 11, "failures": 5, "errors": 3, "skipped": 1}
    (case,) = root.findall(f".//testcase[@classname='{EVIL}']")
    failure = case.find("failure")
    assert failure is not None and failure.text is not None
    assert "reproduce: sacts run" in failure.text


def test_junit_survives_characters_that_xml_forbids() -> None:
    content = junit.render([record(Verdict.ERROR, sentence="bell \x07, null \x00, lone \ud800, fine \u00e9")])
    message = ElementTree.fromstring(content).find(".//failure")
    assert message is not None
    assert message.get("message") == "bell ?, null ?, lone ?, fine \u00e9"
