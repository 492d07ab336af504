# The data of a tensor exchanged.
# move: cpu -> simgpu:0, 1, 12, -, .to
p = torch.nn.Parameter(torch.zeros(3, device="cpu"))
y = p.data.to("simgpu:0")
