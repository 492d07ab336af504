"""What cuDNN's convolutions and recurrent networks take: `python tests/gpu/cudnn.py` measures the tables anew on a GPU.

The rows of `convolutions.csv` and `recurrent.csv` are what an H200 took on 2026-11-27 with torch 2.11, cuDNN 9: bytes
that torch's allocator had at most, beyond what was there before, and for a network what stayed. The shapes are those of
usual models and some at random. `tests/cuda/test_cudnn_workspaces.py` runs them over the fake runtime.
"""

from __future__ import annotations

import csv
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

HERE = Path(__file__).parent
Row = dict[str, Any]
MEASURED = {
    "convolutions": ("forward", "images_gradient", "weight_gradient"),
    "recurrent": ("peak", "kept", "backward"),
}
LAST = {2: torch.channels_last, 3: torch.channels_last_3d}


def rows(table: str) -> list[Row]:
    """Return a table's rows, with numbers where there are any."""
    with (HERE / f"{table}.csv").open(encoding="utf-8", newline="") as file:
        return [{key: _number(text) for key, text in row.items()} for row in csv.DictReader(file)]


def _number(text: str) -> Any:
    return float(text) if "." in text else int(text) if text.isdigit() else text


def taken(run: Callable[[], object]) -> tuple[Any, int, int]:
    """Return what a function returns, the bytes that are allocated while it runs at most, and those that stay."""
    gc.collect(0)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = run()
    torch.cuda.synchronize()
    return found, torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before


def convolution(row: Row) -> dict[str, int]:
    """Run a convolution and both gradients; `operands` and `result` are bytes of what is there besides."""
    torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark = (
        bool(row["tf32"]),
        bool(row["benchmark"]),
    )
    dims, into, out, groups = row["dims"], row["into"], row["out"], row["groups"]
    made: Any = {"device": "cuda", "dtype": getattr(torch, row["dtype"])}
    x = torch.randn(row["images"], into, *[row["size"]] * dims, **made)
    channels = (into, out // groups) if row["transposed"] else (out, into // groups)
    weight = torch.randn(*channels, *[row["filter"]] * dims, **made)
    if row["channels_last"] and dims in LAST:
        x, weight = (each.contiguous(memory_format=LAST[dims]) for each in (x, weight))
    how = [[row[each]] * dims for each in ("stride", "padding", "dilation")]
    rest = (None, *how, bool(row["transposed"]), [0] * dims, groups)
    y, forward, _ = taken(lambda: torch.ops.aten.convolution(x, weight, *rest))
    found = {"forward": forward, "operands": x.nbytes + weight.nbytes, "result": y.nbytes}
    gradient = torch.randn_like(y)
    for name, mask in (
        ("images_gradient", [True, False, False]),
        ("weight_gradient", [False, True, False]),
    ):
        _, found[name], _ = taken(
            lambda mask=mask: torch.ops.aten.convolution_backward(gradient, x, weight, *rest, mask)  # type: ignore[misc]
        )
    return found


def recurrent(row: Row) -> dict[str, int]:
    """Run a recurrent network forward, and backward where it trains."""
    dropout = row["dropout"] if row["layers"] > 1 else 0.0
    net = getattr(nn, row["cell"])(
        row["into"],
        row["hidden"],
        row["layers"],
        bidirectional=bool(row["both_ways"]),
        dropout=dropout,
    )
    net = net.cuda().to(getattr(torch, row["dtype"])).train(bool(row["training"]))
    shape = (row["steps"], row["batch"], row["into"])
    x = torch.randn(shape, device="cuda", dtype=getattr(torch, row["dtype"]), requires_grad=True)
    (y, _), peak, kept = taken(lambda: net(x))
    found = {"peak": peak, "kept": kept}
    if row["training"]:
        _, found["backward"], _ = taken(lambda: y.sum().backward())
    return found


RUN = {"convolutions": convolution, "recurrent": recurrent}


def main() -> None:
    """Measure each row anew and write the tables."""
    for table, run in RUN.items():
        found = [
            {**row, **{key: run(row).get(key, "") for key in MEASURED[table]}}
            for row in rows(table)
        ]
        with (HERE / f"{table}.csv").open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(found[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(found)


if __name__ == "__main__":
    main()
