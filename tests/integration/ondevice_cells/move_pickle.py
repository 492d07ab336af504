# Pickled and back.
# move: simgpu:0 -> cpu, 1, 128, ?, ?
# move: cpu -> simgpu:0, 2, 256, ?, ?
# gap: pickling is not seen
import pickle
y = pickle.loads(pickle.dumps(g))
