"""Whose code a frame runs is decided once, by the name of its module and not by where this interpreter installs."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import FrameType

import pytest

import gpumagic
from gpumagic.source import frames

CODE = "import sys\ndef frame():\n    return sys._getframe()\n"


def frame_in(**namespace: object) -> FrameType:
    exec(CODE, namespace)
    return namespace["frame"]()


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("torch.nn.functional", "/opt/checkout/torch/nn/functional.py"),
        ("IPython.core.magic", "/opt/checkout/IPython/core/magic.py"),
        ("gpumagic.api", "/opt/checkout/gpumagic/api.py"),
        (
            "transformers.trainer",
            "/home/me/.local/lib/python3.12/site-packages/transformers/trainer.py",
        ),
        ("numpy", "/usr/lib/python3/dist-packages/numpy/__init__.py"),
        ("__main__", "/usr/lib/python3/dist-packages/ipykernel_launcher.py"),
        ("contextlib", contextlib_file := str(importlib.import_module("contextlib").__file__)),
        ("", contextlib_file),
        ("", "<frozen importlib._bootstrap>"),
        ("importlib._bootstrap", ""),
    ],
)
def test_python_torch_and_what_is_installed_anywhere_are_libraries(name, file) -> None:
    assert not frames.is_user_code(frame_in(__name__=name, __file__=file))


@pytest.mark.parametrize(
    "namespace",
    [
        {"__name__": "__main__"},
        {"__name__": "__main__", "__file__": "/home/me/train.py"},
        {"__name__": "model", "__file__": "/home/me/model.py"},
        {"__name__": "code", "__file__": "/home/me/code.py"},
        {"__name__": "torchtools.data", "__file__": "/home/me/torchtools/data.py"},
        {"__name__": "__main__", "__file__": sys.prefix + "_of_mine/train.py"},
        {"__name__": 3, "__file__": None},
        {},
    ],
)
def test_cells_scripts_and_modules_that_are_not_installed_are_the_user_s(namespace) -> None:
    assert frames.is_user_code(frame_in(**namespace))


def test_what_was_asked_of_a_module_is_remembered() -> None:
    frame = frame_in(__name__="model", __file__="/home/me/model.py")
    frames.is_user_code(frame)
    asked = frames.is_library.cache_info().hits
    frames.is_user_code(frame)
    assert frames.is_library.cache_info().hits == asked + 1


def test_no_other_module_asks_where_packages_are_installed() -> None:
    package = Path(gpumagic.__file__).parent
    asking = [
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if any(word in path.read_text(encoding="utf-8") for word in ("site-packages", "purelib"))
    ]
    assert asking == ["source/frames.py"]
