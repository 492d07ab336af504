"""Runs the rows and writes RESULTS.md."""

from __future__ import annotations

import json
from collections import Counter
from importlib.metadata import version

from published.table import AGREE, HERE, TODAY, Measured, Row, environment, measure, measured, record, rows, runs_here

from gpumagic.dryrun import checked

STATUSES = {
    "exact": "to the byte, or to the last digit that was given",
    "within": "within 1 %",
    "explained": "further off, and the cause is known",
    "open": "further off, and the cause is not known",
}


def main(arguments: list[str]) -> int:
    """Run the rows and write the table; return 1 if one is further off than recorded."""
    every = rows()
    words = [each for each in arguments if each != "--check"]
    wanted = [row for row in every if runs_here(row) and all(word in row.name for word in words)]
    recorded, found = measured(), {}
    grown = 0
    kinds: Counter[str] = Counter()
    for row, ours, its_kinds in measure(wanted):
        kinds.update(its_kinds if row.status(ours) in AGREE else ())
        key = row.name, environment()
        worse = row.is_worse(ours, recorded.get(key, ours))
        grown += worse
        found[key] = ours
        print(
            f"{row.name}: {row.figure} {row.unit}, {ours} B, {row.error(ours):+.3%} {row.status(ours)}"
            f"{', further off than recorded' if worse else ''}",
            flush=True,
        )
    if "--check" not in arguments:
        names = {row.name for row in every}
        known = measured() | found  # another environment may have measured meanwhile
        known = {key: known[key] for key in sorted(known) if key[0] in names}
        record(known)
        if wanted == every and environment() == TODAY:
            _record_kinds(kinds, Counter(row.status(row.ours(known)) for row in every))
        (HERE / "RESULTS.md").write_text(_page([row for row in every if row.ours(known)], known), encoding="utf-8")
    return int(grown > 0)


def _record_kinds(kinds: Counter[str], counts: Counter[str]) -> None:
    """Write what dry runs say of their error: the kinds of operators that ran where figures agree, in how many rows."""
    agree = sum(counts[each] for each in AGREE)
    told = {"within": agree, "figures": counts.total(), "kinds": dict(sorted(kinds.items()))}
    checked.DATA.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def _page(every: list[Row], known: Measured) -> str:
    torch = version("torch").partition("+")[0]
    counts = Counter(row.status(row.ours(known)) for row in every)
    gpus = sorted({row.gpu for row in every} - {"not said"})
    torches = sorted({row.versions.split(",")[0] for row in every if row.versions.startswith("torch ")})
    lines = [
        "# What others measured on real GPUs, and what the fake CUDA runtime says",
        "",
        "Each figure is somebody else's, of torch's allocator on a real GPU. Each cell is ours, from the published",
        "configuration; no row was tuned, and those that disagree stay in. What a cell puts back is what the published",
        f"versions did and today's do not. Ours are with torch {torch} and transformers {TODAY}; where a model's code",
        "has changed since, with the transformers of the time as well, and that counts.",
        "Written by `python -m tests.published`.",
        "",
        f"{len(every)} rows; {len(gpus)} kinds of GPU: {', '.join(gpus)}; {', '.join(torches)}.",
        "",
        "| status | rows | |",
        "| --- | ---: | --- |",
        *(f"| {status} | {counts[status]} | {said} |" for status, said in STATUSES.items()),
        "",
    ]
    for source in dict.fromkeys((row.source, row.gpu) for row in every):
        lines += _section([row for row in every if (row.source, row.gpu) == source], known)
    return "\n".join(lines)


def _section(of_source: list[Row], known: Measured) -> list[str]:
    first = of_source[0]
    lines = [
        f"## {first.source}",
        "",
        f"{first.gpu}; {first.versions}."
        + ("" if first.checked else " We did not find it there again: the figures are as they were handed to us."),
        *(f"Put back: {each}." for each in first.put_back),
        "",
        f"| row | published | ours, B | error | status | with transformers {TODAY} | cause |",
        "| --- | ---: | ---: | ---: | --- | ---: | --- |",
    ]
    for row in of_source:
        ours, today = row.ours(known), known.get((row.name, TODAY))
        cause = row.cause or (f"perhaps {row.guess}" if row.guess else "")
        other = f"{row.error(today):+.2%}" if today and row.transformers else ""
        lines.append(
            f"| {row.name} | {row.figure} {row.unit} | {ours} | {row.error(ours):+.3%} | {row.status(ours)} "
            f"| {other} | {cause} |"
        )
    return [*lines, ""]
