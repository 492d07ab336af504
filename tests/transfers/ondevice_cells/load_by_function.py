# Map_location as a function.
# move: simgpu:0 -> cpu, 1, 128, g, torch.save
import io
file = io.BytesIO()
torch.save(g, file)
file.seek(0)
y = torch.load(file, map_location=lambda storage, where: storage)
