# A tensor without elements.
y = torch.empty(0, device="cpu").to("simgpu:0")
