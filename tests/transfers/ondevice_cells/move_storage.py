# A storage moved.
# move: simgpu:0 -> cpu, 1, 128, -, storage.cpu
y = g.untyped_storage().cpu()
