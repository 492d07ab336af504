# Vmap over a move's result.
# move: cpu -> simgpu:0, 1, 4000, x, .to
y = torch.vmap(lambda row: row * 2)(x.to("simgpu:0"))
