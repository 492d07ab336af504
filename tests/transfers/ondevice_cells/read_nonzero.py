# Nonzero waits and moves nothing of the user's.
# move: simgpu:0 -> cpu, 1, 4, g, .nonzero
where = g.nonzero()
