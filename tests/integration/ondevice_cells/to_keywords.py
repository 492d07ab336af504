# Everything by keyword.
# move: cpu -> simgpu:0, 1, 4000, ?, ?
# gap: a non-blocking move that converts crosses in the type of its source
y = x.to(device="simgpu:0", dtype=torch.float16, non_blocking=True, copy=True)
