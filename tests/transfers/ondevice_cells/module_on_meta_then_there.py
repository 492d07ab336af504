# Planned on meta, then made.
net = torch.nn.Linear(4, 3, device="meta")
net.to_empty(device="simgpu:0")
