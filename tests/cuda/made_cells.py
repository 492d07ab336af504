"""Training cells that Hypothesis makes: a loop of pieces as people write them, and what comes after it."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import strategies as st

from tests.cuda.cell_runs import Cell

_SETUP = """
from collections import deque
import copy
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)
model = nn.Sequential({layers}).to("cuda:0")
optimizer = torch.optim.{optimizer}
far = nn.Linear({width}, 300).to("cuda:1")
sizes = {sizes}
"""
_BEGINNING = """
kept, states, best, bad, batch, total = [], [], float("inf"), 0, {batch}, 0
recent, whole = deque(maxlen={most}), torch.empty(0, {width}, device="cuda:0")
for step in range({steps}):
    x = torch.randn({rows}, {width}, device="cuda:0")
    {forward}
    loss = out.square().mean()
"""
_ROWS = (
    "batch",
    "batch * (step + 1)",
    "sizes[step % len(sizes)]",
    "batch * 2 if step % 3 == 2 else batch",
)
_FORWARDS = (
    "out = model(x)", "out = checkpoint(model, x.requires_grad_(), use_reentrant=False)",
    "with torch.autocast('cuda', dtype=torch.bfloat16): out = model(x)\n    out = out.float()",
)  # fmt: skip
_OPTIMIZERS = (
    "SGD(model.parameters(), 0.1, momentum=0.9)", "Adam(model.parameters())", "AdamW(model.parameters(), fused=True)",
    "RMSprop(model.parameters(), foreach=False)",
)  # fmt: skip
_STEPS = (
    "optimizer.zero_grad(); loss.backward(); optimizer.step()",
    "loss.backward()\n    optimizer.step()\n    optimizer.zero_grad(set_to_none=False)",
    "(loss / 3).backward()\n    if (step + 1) % 3 == 0:\n        optimizer.step(); optimizer.zero_grad()",
    "del loss; out = out.detach(); loss = out.mean()",
)
_PIECES = (
    "kept.append(out.detach())",
    "kept.append(model(x[:32]))",
    "total = total + model(x[:32]).sum()",
    "recent.append(out.detach().clone())",
    "whole = torch.cat([whole, out.detach()])",
    "there = far(out.detach().to('cuda:1')); states.append(there.detach().sum(1))",
    "if step % 4 == 1:\n        with torch.no_grad(): states.append(model(torch.ones(700, {width}, device='cuda:0')))",
    "if step == 2: states.append(copy.deepcopy(model))",
    "if step % 2: del x, out",
    "batch = min(batch * 2, 900)",
)
_READS = (
    "if loss.item() < best: best = loss.item(); states = [v.clone() for v in model.state_dict().values()]",
    "if loss.item() < best:\n        best = loss.item(); states.append(copy.deepcopy(model.state_dict()))",
    "if loss.item() < best: best = loss.item()\n    else: bad += 1\n    if bad >= 2: batch, bad = batch * 2, 0",
    "if loss > 0: kept.append(x.clone())",
    "if loss.item() > 1.5 * best: break\n    best = min(best, loss.item()); kept.append(x.clone())",
)
_ENDS = (
    "", "kept = torch.cat([each.flatten() for each in kept]) if kept else None", "states = states[:2]",
    "recent = torch.stack([each.mean() for each in recent]) if recent else None", "del model, optimizer",
)  # fmt: skip
_VALUES = tuple({"number": each, "truth": truth} for each, truth in (
    ("constant", "False"), ("falling", "True"), ("rising", "in turn"), ("changing sign", "False"),
))  # fmt: skip


@st.composite
def made_cells(draw: Callable[..., object], *, reads: bool) -> Cell:
    """Make a cell; with ``reads``, one in which what the host reads may decide what happens."""
    width, depth = draw(st.sampled_from((64, 250, 512))), draw(st.integers(1, 3))
    layers = ", ".join([f"nn.Linear({width}, {width}), nn.ReLU()"] * depth)
    pieces = draw(st.lists(st.sampled_from(_PIECES), max_size=3, unique=True))
    if reads:
        pieces += draw(st.lists(st.sampled_from(_READS), min_size=1, max_size=1))
    # What lets go of a name comes last, as nothing after it in the pass could use it.
    pieces = [draw(st.sampled_from(_STEPS)), *sorted(pieces, key=lambda piece: "del x" in piece)]
    sizes = draw(st.lists(st.sampled_from((1, 40, 300, 700)), min_size=1, max_size=4))
    filled = {
        "layers": layers, "width": width, "sizes": sizes, "optimizer": draw(st.sampled_from(_OPTIMIZERS)),
        "batch": draw(st.sampled_from((16, 100, 333))), "most": draw(st.integers(1, 6)),
        "steps": draw(st.integers(1, 14)), "rows": draw(st.sampled_from(_ROWS)),
        "forward": draw(st.sampled_from(_FORWARDS)),
    }  # fmt: skip
    body = "".join(f"    {piece}\n" for piece in pieces).replace("{width}", str(width))
    code = _BEGINNING.format(**filled) + body + draw(st.sampled_from(_ENDS)) + "\n"
    return Cell("made", _SETUP.format(**filled), code, _VALUES if reads else ({},))
