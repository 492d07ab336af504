# Pickled and back.
# move: simgpu:0 -> cpu, 1, 128, ?, pickle
# move: cpu -> simgpu:0, 2, 256, ?, pickle
import pickle
y = pickle.loads(pickle.dumps(g))
