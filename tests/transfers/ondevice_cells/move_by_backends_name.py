# A backend without an index is the chosen card.
# move: cpu -> simgpu:0, 1, 4000, x, .to
y = x.to("simgpu")
z = torch.zeros(3, device="simgpu")
