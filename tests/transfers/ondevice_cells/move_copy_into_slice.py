# Copied into a slice.
# move: cpu -> simgpu:0, 1, 32, -, copy_
g[:2].copy_(torch.ones(2, 4, device="cpu"))
