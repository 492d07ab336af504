"""Python code is read in several threads at once."""

from __future__ import annotations

import ast
import gc
import sys
import threading

from gpumagic.source import text

CODE = "\n".join(f"x{n} = [f(y, {n}) for y in range({n}) if y > {n}]" for n in range(300))


def in_python(_phase: str, _info: dict[str, int]) -> None:
    """Do nothing, in Python."""
    sum(range(20))


def test_threads_that_parse_at_once_all_get_their_tree() -> None:
    """Before 3.11.8 and 3.12.2 Python itself fails here; `with ondevice(...)` in two threads met it."""
    trees, interval, thresholds = [], sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(1e-6)
    gc.set_threshold(50)
    gc.callbacks.append(in_python)  # while nodes are made, so that threads take turns there
    try:
        threads = [
            threading.Thread(target=lambda: trees.extend(text.parse_tree(CODE) for _ in range(10)))
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        gc.callbacks.remove(in_python)
        gc.set_threshold(*thresholds)
        sys.setswitchinterval(interval)
    assert len(trees) == 30
    assert all(tree is not None for tree in trees)


def test_a_library_that_parses_meanwhile_makes_it_try_again(monkeypatch) -> None:
    parse, failures = (
        ast.parse,
        [SystemError("AST constructor recursion depth mismatch (before=42, after=38)")],
    )

    def failing_once(source: str) -> ast.Module:
        if failures:
            raise failures.pop()
        return parse(source)

    with monkeypatch.context() as patched:  # pytest parses too
        patched.setattr(ast, "parse", failing_once)
        tree = text.parse_tree("x = 1")
    assert tree is not None
    assert ast.dump(tree) == ast.dump(parse("x = 1"))
