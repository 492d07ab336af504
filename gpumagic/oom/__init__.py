"""`%%oomguard`: out of memory: recognised, released, explained, and what would help."""
