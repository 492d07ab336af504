"""Runs the rows and writes RESULTS.md."""

from __future__ import annotations

from collections import Counter

from tests.published.table import (
    AGREE,
    HERE,
    TODAY,
    TORCH,
    Measured,
    Row,
    environment,
    measure,
    measured,
    record,
    rows,
    runs_here,
)

STATUSES = {
    "exact": "to the byte, or to the last digit that was given",
    "within": "within 1 %",
    "explained": "further off, and the cause is known",
    "open": "further off, and the cause is not known",
}


DEAR = {"torchtitan"}
"""Cells that `--check` runs only if they are named."""


def main(arguments: list[str]) -> int:
    """Run the rows and write the table; return 1 if one is further off than recorded."""
    every = rows()
    words = [each for each in arguments if each != "--check"]
    wanted = [row for row in every if runs_here(row) and all(word in row.name for word in words)]
    if "--check" in arguments and not words:
        wanted = [row for row in wanted if row.cell not in DEAR]
    recorded = {name: ours for (name, where), ours in measured().items() if where == environment()}
    found: Measured = {}
    trial = wanted
    for _ in range(
        5
    ):  # what a cell of two processes has depends on when each is served: it is tried again
        worse = []
        for row, ours in measure(trial):
            found[row.name, environment()] = ours
            worse += [row] * row.is_worse(ours, recorded.get(row.name, ours))
            said = ", further off than recorded" if row in worse else ""
            error = f"{row.error(ours):+.3%} {row.status(ours)}{said}"
            print(f"{row.name}: {row.figure} {row.unit}, {ours} B, {error}", flush=True)
        trial = worse
        if not worse:
            break
    if "--check" not in arguments:
        names = {row.name for row in every}
        known = measured() | found  # another environment may have measured meanwhile
        known = {key: known[key] for key in sorted(known) if key[0] in names}
        record(known)
        (HERE / "RESULTS.md").write_text(
            _page([row for row in every if row.ours(known)], known), encoding="utf-8"
        )
    return int(bool(worse))


def _page(every: list[Row], known: Measured) -> str:
    counts = Counter(row.status(row.ours(known)) for row in every)
    gpus = sorted({row.gpu for row in every} - {"not said"})
    torches = sorted(
        {row.versions.split(",")[0] for row in every if row.versions.startswith("torch ")}
    )
    lines = [
        "# What others measured on real GPUs, and what the fake CUDA runtime says",
        "",
        "Each figure is somebody else's, of torch's allocator on a real GPU. Each cell is ours, from the published",
        "configuration; no row was tuned, and those that disagree stay in. What a cell puts back is what the published",
        f"versions did and today's do not. Ours are with torch {TORCH} and transformers {TODAY}; where a model's code",
        "has changed since, with the transformers of the time as well, and that counts.",
        "Some were measured with an older torch, too.",
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
        + (
            ""
            if first.checked
            else " We did not find it there again: the figures are as they were handed to us."
        ),
        *(f"Put back: {each}." for each in first.put_back),
        "",
        f"| row | published | ours, B | error | status | with transformers {TODAY} | with older torch | cause |",
        "| --- | ---: | ---: | ---: | --- | ---: | --- | --- |",
    ]
    for row in of_source:
        ours, today = row.ours(known), known.get((row.name, TODAY))
        cause = row.cause or (f"perhaps {row.guess}" if row.guess else "")
        cause = "" if row.status(ours) in AGREE else cause
        other = f"{row.error(today):+.2%}" if today and row.transformers else ""
        older = ", ".join(
            f"{torch}: {row.error(nbytes):+.2%}"
            for torch, nbytes in row.with_older_torch(known).items()
        )
        lines.append(
            f"| {row.name} | {row.figure} {row.unit} | {ours} | {row.error(ours):+.3%} | {row.status(ours)} "
            f"| {other} | {older} | {cause} |"
        )
    return [*lines, ""]
