# Random numbers by a host's generator.
# move: cpu -> simgpu:0, 1, 12, r, .to
r = torch.rand(3, generator=torch.Generator().manual_seed(0))
y = r.to("simgpu:0")
