# Loaded without saying where.
import io
file = io.BytesIO()
torch.save(x, file)
file.seek(0)
y = torch.load(file)
