# Saved on one card, loaded on the other.
# move: simgpu:0 -> cpu, 1, 128, g, torch.save
# move: cpu -> simgpu:1, 1, 128, -, torch.load
import io
file = io.BytesIO()
torch.save(g, file)
file.seek(0)
y = torch.load(file, map_location={"simgpu:0": "simgpu:1"})
