"""A request to the worker, for tests that speak to it, or are it, themselves."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from gpumagic.dryrun import wire

NOTHING = os.devnull
"""The path of shared memory with nothing in it."""


def request(**changes: Any) -> wire.Request:
    """Return a request of a cell without a notebook, on one fake device without end.

    Args:
        changes: other values of fields, of `Request` or of one of the records in it.
    """
    code = {"source": "pass", "filename": "<cell>", "sources": {}}
    notebook = {"data": b"", "shared": NOTHING, "slots": [], "scopes": 1, "values": {}}
    devices = {
        "engine": "fake",
        "backend": "cuda",
        "gpu": None,
        "gpus": "",
        "capacities": [None],
        "base": [0],
        "segments": [None],
        "workspaces": [[]],
        "cuts_to_size": False,
    }
    imports = {"path": list(sys.path), "folder": str(Path.cwd()), "preload": [], "installed": []}
    random = {"python": (), "torch": b"", "numpy": None}
    whole: dict[str, Any] = {"time_limit": 30.0}
    for name, value in changes.items():
        records = (code, notebook, devices, imports, random)
        fields = next((record for record in records if name in record), whole)
        fields[name] = value
    return wire.Request(
        code=wire.Code(**code),
        notebook=wire.Notebook(**notebook),
        devices=wire.Devices(**devices),
        imports=wire.Imports(**imports),
        random=wire.RandomStates(**random),
        **whole,
    )
