"""Nothing is sent anywhere: no socket is made by the magics, but those of a cluster."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config
config = Config()
config.HistoryManager.enabled = False
shell = InteractiveShell.instance(config=config)
shell.run_cell("%load_ext gpumagic\\nimport torch\\nfrom gpumagic import simgpu\\nsimgpu.enable(2, '64MiB')")
made = []
def heard(event, arguments):
    if event in ("socket.connect", "socket.bind", "socket.sendto", "socket.getaddrinfo", "urllib.Request"):
        address = arguments[1] if event != "socket.getaddrinfo" and len(arguments) > 1 else arguments
        if not isinstance(address, (str, bytes)):  # a path is a pipe of this machine, as multiprocessing's
            made.append((event, repr(address)))
sys.addaudithook(heard)
for cell in (
    "%gpuinfo", "%gpuinfo -a -p", "%devices", "%devices --leaks", "x = torch.ones(3)",
    "%devices --why x", "%%ondevice 1 --trace\\ny = x.cuda() if False else x.to('simgpu:1')",
    "%%oomguard\\ntorch.ones(2**26, device='simgpu:0')", "%%dryrun\\ntorch.ones(4, device='simgpu:0')",
    "%unload_ext gpumagic",
):
    shell.run_cell(cell)
print("made", made)
import socket
socket.socket().connect_ex(("127.0.0.1", 9))
print("heard", len(made))
"""


def test_no_magic_opens_a_connection() -> None:
    result = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, check=False
    )
    assert "made []" in result.stdout, result.stdout[-2000:] + result.stderr[-2000:]
    assert "heard 1" in result.stdout
