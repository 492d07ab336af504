# Saved on the host, loaded there.
import io
file = io.BytesIO()
torch.save(x, file)
file.seek(0)
y = torch.load(file, map_location="cpu")
