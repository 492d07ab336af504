# A backward pass that has no need of what was moved.
# move: cpu -> simgpu:0, 1, 16, -, .to
w = torch.ones(4, requires_grad=True)
(w * torch.ones(4, device="cpu").to("simgpu:0")).sum().backward()
