"""What objects leave behind that tests of names and of holders make."""

from tests.heap.makers import nothing_left

__all__ = ["nothing_left"]
