"""What the notebook's process and the worker say to each other: both import this module, and it imports nothing."""

from __future__ import annotations

Key = tuple["int | None", str, str]
"""A line of the cell, the expression that reads or decides, and where in a library it does, or nothing."""

HOST: Key = (None, "", "")
"""Contents of the host that were not sent: which expression reads them is not known."""
EVERY: Key = (None, "every", "")
"""Stands for all places at which a number is read and that go no way of their own."""
TRUTH, ORDER, SELECTION, NUMBER = "truth", "order", "selection", "number"
"""Kinds of what decides: a truth or a comparison; an order or a key by which C code sorts and finds, with more than
two outcomes; how many elements a mask selects; a number, or a tensor of some, that went where nothing is noted."""
FALLING, LARGE, LARGER, LAST = 1, 2, 3, 4
"""What needs more with a larger number has it for its size; the last of a list has -1 for its index."""
ALWAYS, BUT_ONCE, ONCE, A_FEW = "always", "but once", "once", "a few"
