# Saved on the host, loaded on a card.
# move: cpu -> simgpu:0, 1, 4000, ?, ?
# gap: torch.save and torch.load are not seen
import io
file = io.BytesIO()
torch.save(x, file)
file.seek(0)
y = torch.load(file, map_location="simgpu:0")
