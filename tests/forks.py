"""Fresh processes with torch in them, for what a process decides once: its settings of the allocator, its devices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

SERVER = """
import io, json, os, sys, torch, gpumagic
from gpumagic import fakecuda
MIB = 1024**2

def answer(code, environment):
    os.environ.update(environment)
    names = dict(globals())
    exec(code, names)
    return names["answer"]

exec(sys.argv[1], {})
for line in sys.stdin:
    asked = json.loads(line)
    read, write = os.pipe()
    if not os.fork():
        try:
            told = {"answer": answer(**asked)}
        except BaseException as error:
            told = {"error": f"{type(error).__name__}: {error}"}
        os.write(write, json.dumps(told).encode())
        os._exit(0)
    os.close(write)
    with open(read) as pipe:
        print(pipe.read() or json.dumps({"error": "it died"}), flush=True)
    os.wait()
"""


class Forks:
    """A process that has imported torch and not touched CUDA; each piece of code runs in a fork of it.

    Args:
        first: code that it runs before the first fork, such as further imports.
        environment: what differs from this process's, of what is read when torch is imported.
    """

    def __init__(self, first: str = "", **environment: str) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-c", SERVER, first], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, **environment},
        )  # fmt: skip

    def run(self, code: str, **environment: str) -> Any:
        """Return what the code assigns to `answer`, as JSON carries it; fail with the error that it raises."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        print(
            json.dumps({"code": code, "environment": environment}),
            file=self._server.stdin,
            flush=True,
        )
        told = json.loads(self._server.stdout.readline())
        assert "error" not in told, told["error"]
        return told["answer"]

    def close(self) -> None:
        """End the process."""
        self._server.communicate()
