"""Reports as files for others: HTML and trace events, each read by what reads such a file."""

from __future__ import annotations

import html.parser
import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from gpumagic.errors import OptionError
from gpumagic.transfers.report import TransferReport


@pytest.fixture(scope="module")
def traced() -> TransferReport:
    from gpumagic import simgpu
    from tests.transfers import ondevice_corpus as corpus

    simgpu.enable(devices=2, memory="4GiB")
    cell = "def step(n):\n    return model(g * n)\nmodel = model.to('simgpu:0')\nfor n in range(3):\n    y = step(n)"
    report, _, _ = corpus.run(cell, trace=["model.forward"])
    return report


class Page(html.parser.HTMLParser):
    """Notes what a page would load, and whether its tags close."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "br", "img", "col"):
            self.open.append(tag)
        self.loads += [value or "" for name, value in attrs if name in ("src", "href")]
        assert tag not in ("script", "link", "iframe")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_a_saved_page_is_whole_and_loads_nothing(traced: TransferReport, tmp_path: Path) -> None:
    text = traced.save(tmp_path / "report.html").read_text(encoding="utf-8")
    page = Page()
    page.feed(text)
    assert (page.open, page.loads) == ([], [])
    assert text.startswith("<!DOCTYPE html>")
    assert not re.search(r"url\(|@import|://", text)


def test_another_ending_is_refused(traced: TransferReport, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"'r\.pdf' does not end in \.html"):
        traced.save(tmp_path / "r.pdf")


REQUIRED = {
    "M": {"name", "pid", "tid", "args"},
    "X": {"name", "cat", "pid", "tid", "ts", "dur", "args"},
    "C": {"name", "pid", "tid", "ts", "args"},
}
"""What an event must have by its phase, by "Trace Event Format", Google: metadata, complete events, counters."""
METADATA = {"process_name": "name", "thread_name": "name"}


def events_by_thread(path: Path) -> dict[int, list[dict[str, Any]]]:
    """Return the spans of a file by thread, and check each event by the rules of the format."""
    whole = json.loads(path.read_text())
    assert set(whole) == {"traceEvents", "displayTimeUnit"}
    assert whole["displayTimeUnit"] in ("ms", "ns")
    events, threads, counters = whole["traceEvents"], defaultdict(list), defaultdict(list)
    for event in events:
        assert REQUIRED[event["ph"]] <= set(event)
        assert type(event["pid"]) is type(event["tid"]) is int
        assert type(event["name"]) is str
        assert event["ph"] != "M" or type(event["args"][METADATA[event["name"]]]) is str
        assert event["ph"] == "M" or (type(event["ts"]) in (int, float) and event["ts"] >= 0)
        if event["ph"] == "X":
            assert event["dur"] >= 0
            threads[event["tid"]].append(event)
        if event["ph"] == "C":
            assert event["args"]
            assert all(type(value) in (int, float) for value in event["args"].values())
            counters[event["name"]].append(event["ts"])
    assert all(times == sorted(times) for times in counters.values())
    named = {event["tid"] for event in events if event["name"] == "thread_name"}
    assert set(threads) <= named
    return threads
