"""torch's allocators: their figures, their segments, and the timeline of a cell."""
