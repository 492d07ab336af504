# A checkpoint is loaded to the device where it was saved, beside the model it is for.
# verdict: shortage
# advice: Load the checkpoint into the host's memory
# %%
import os
import tempfile

path = os.path.join(tempfile.mkdtemp(), "model.pt")
net = nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(5)]).to("simgpu:0")
torch.save(net.state_dict(), path)
# %%
net.load_state_dict(torch.load(path))
os.remove(path)
