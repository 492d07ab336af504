# Examples moved within `vmap`.
# move: cpu -> simgpu:0, 1, 4000, ?, .to
y = torch.vmap(lambda row: row.to("simgpu:0") * 2)(x)
