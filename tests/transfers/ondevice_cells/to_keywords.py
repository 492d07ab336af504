# Everything by keyword.
# move: cpu -> simgpu:0, 1, 4000, x, .to
y = x.to(device="simgpu:0", dtype=torch.float16, non_blocking=True, copy=True)
