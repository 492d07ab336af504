"""What is sent to an engine, as text: it stands on its own, since gpumagic may not be there, or be another one.

It is run by the engine's Python, whichever that is, and answers in plain data; reports travel pickled.
"""


def answer(errand, arguments, version):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201  # it stands on its own
    """Do an errand of `gpumagic.cluster.requests` here, and return the state, the report and what went wrong.

    Args:
        errand: the name of the function.
        arguments: its keyword arguments, plain data.
        version: the gpumagic that asks; another one is not tried.
    """
    import importlib.util
    import os
    import pickle
    import socket
    import time
    import zlib

    def is_there(package: str) -> bool:
        try:
            return importlib.util.find_spec(package) is not None
        except ImportError:
            return False

    facts = {"state": "answered", "host": socket.gethostname(), "pid": os.getpid()}
    started = time.perf_counter()
    try:
        if not is_there("gpumagic"):
            return {**facts, "state": "no gpumagic"}
        import gpumagic

        here = str(gpumagic.__version__)
        if here != version:
            return {**facts, "state": "other version", "detail": here}
        from gpumagic.cluster import requests

        found = getattr(requests, errand)(**arguments)
        facts["answer"] = zlib.compress(pickle.dumps(found, protocol=5), 1)
    except Exception as error:  # the one who asked is told
        facts.update(state="failed", detail=f"{type(error).__name__}: {error}")
    facts["seconds"] = time.perf_counter() - started
    if not is_there("torch") and facts["state"] == "answered":
        facts["state"] = "no torch"
    return facts
