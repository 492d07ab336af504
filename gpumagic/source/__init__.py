"""The code of a cell and the line that runs: frames, whose they are, and what an expression names."""
