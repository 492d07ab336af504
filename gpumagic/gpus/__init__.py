"""`%gpuinfo`: the GPUs, who uses them, or why there is none."""
