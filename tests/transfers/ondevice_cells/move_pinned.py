# Pinned, then moved without waiting.
# move: cpu -> simgpu:0, 1, 4000, -, .to
y = x.pin_memory().to("simgpu:0", non_blocking=True)
