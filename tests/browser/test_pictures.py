"""Takes the pictures of the pages, in JupyterLab light and dark, where `GPUMAGIC_PICTURES` names a folder for them."""

from __future__ import annotations

import os

import pytest

FOLDER = os.environ.get("GPUMAGIC_PICTURES", "")
SETUP = """
%load_ext gpumagic
%config GPUMagic.advice_seconds = 60
%xmode Minimal
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 10)).to("simgpu:0")
x, y = torch.randn(4096, 256), torch.randint(10, (4096,))
"""
CELLS = {
    "gpuinfo": "%gpuinfo",
    "oomguard": """%%oomguard
batch_size = 8192
images, classes = torch.randn(16384, 256), torch.randint(10, (16384,))
opt = torch.optim.AdamW(model.parameters())
for image, label in zip(images.split(batch_size), classes.split(batch_size)):
    logits = model(image.to("simgpu:0"))
    loss = nn.functional.cross_entropy(logits, label.to("simgpu:0"))
    loss.backward()
    opt.step()""",
    "cleared": "del images, classes, image, label, opt",
    "dryrun": """%%dryrun --fit batch_size
batch_size = 256
opt = torch.optim.AdamW(model.parameters())
for step in range(3):
    logits = model(torch.randn(batch_size, 256, device="simgpu:0"))
    logits.square().mean().backward()
    opt.step()""",
    "ondevice": """%%ondevice 0
losses = []
for _ in range(6):
    inputs, labels = x.to("simgpu:0"), y.to("simgpu:0")
    logits = model(inputs[:512])
    loss = nn.functional.cross_entropy(logits, labels[:512])
    losses.append(loss)
print(loss.item())""",
    "devices": "%devices -n 8",
}
SHOWN = ("oomguard", "dryrun", "ondevice", "devices", "gpuinfo")
"""In this order they are the README's moving picture; the first is what stands where pictures do not move."""


@pytest.mark.skipif(not FOLDER, reason="pictures are taken where GPUMAGIC_PICTURES names a folder")
@pytest.mark.parametrize("theme", ["Light", "Dark"])
def test_a_picture_of_each_magic(notebook_page, server, theme) -> None:
    page = notebook_page
    server.set_theme(f"JupyterLab {theme}")
    page.page.set_viewport_size({"width": 1240, "height": 3000})
    page.open([SETUP, *CELLS.values()])
    page.run(0)
    for index, name in enumerate(CELLS, start=1):
        page.run(index)
        page.cell(0).locator(".cm-content").click()  # away from the cell, so that no frame marks it
        page.cell(index).screenshot(path=f"{FOLDER}/{name}-{theme.lower()}.png")
    server.set_theme("JupyterLab Light")
    animate(
        [f"{FOLDER}/{name}-{theme.lower()}.png" for name in SHOWN],
        f"{FOLDER}/magics-{theme.lower()}.png",
    )


def animate(pictures: list[str], path: str) -> None:
    """Write the pictures as one that moves: each for four seconds, in the colour of the page where it is smaller."""
    image = pytest.importorskip("PIL.Image")
    frames = [image.open(picture).convert("RGB") for picture in pictures]
    size = max(frame.width for frame in frames), max(frame.height for frame in frames)
    pages = [image.new("RGB", size, frame.getpixel((0, 0))) for frame in frames]
    for page, frame in zip(pages, frames, strict=True):
        page.paste(frame)
    pages[0].save(
        path, save_all=True, append_images=pages[1:], duration=4000, loop=0, optimize=True
    )
