# A tensor without elements.
# gap: a move of nothing is counted
y = torch.empty(0, device="cpu").to("simgpu:0")
