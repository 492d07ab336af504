# A storage moved.
# move: simgpu:0 -> cpu, 1, 128, ?, ?
# gap: moves of a storage are not seen
y = g.untyped_storage().cpu()
