# Saved on the host, loaded on a card.
# move: cpu -> simgpu:0, 1, 4000, -, torch.load
import io
file = io.BytesIO()
torch.save(x, file)
file.seek(0)
y = torch.load(file, map_location="simgpu:0")
