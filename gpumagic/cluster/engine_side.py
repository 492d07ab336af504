"""The code that is sent to an engine as text. It stands alone: the engine may have no gpumagic, or another version.

It runs on whatever Python the engine has, and answers in plain data; reports travel pickled.
"""


def answer(request, arguments, version):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201  # it stands alone
    """Call a function of `gpumagic.cluster.requests` here, and return the state, the report and any error.

    Args:
        request: the name of the function.
        arguments: its keyword arguments, plain data.
        version: the gpumagic of the client; nothing is called in another version.
    """
    import importlib.util
    import os
    import pickle
    import socket
    import time
    import zlib

    def is_installed(package: str) -> bool:
        try:
            return importlib.util.find_spec(package) is not None
        except ImportError:
            return False

    facts = {"state": "answered", "host": socket.gethostname(), "pid": os.getpid()}
    started = time.perf_counter()
    try:
        if not is_installed("gpumagic"):
            return {**facts, "state": "no gpumagic"}
        import gpumagic

        here = str(gpumagic.__version__)
        if here != version:
            return {**facts, "state": "other version", "detail": here}
        from gpumagic.cluster import requests

        found = requests.serve(request, arguments)
        facts["answer"] = zlib.compress(pickle.dumps(found, protocol=5), 1)
    except Exception as error:  # reported by the client
        facts.update(state="failed", detail=f"{type(error).__name__}: {error}")
    facts["seconds"] = time.perf_counter() - started
    if not is_installed("torch") and facts["state"] == "answered":
        facts["state"] = "no torch"
    return facts
