# Buffers go along.
# move: cpu -> simgpu:0, 5, 88, norm, Module.to
norm = torch.nn.BatchNorm1d(5, device="cpu")
norm.to("simgpu:0")
