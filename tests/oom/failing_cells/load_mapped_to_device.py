# The same, asked for.
# verdict: shortage
# advice: Load the checkpoint into the host's memory
# %%
import os
import tempfile

path = os.path.join(tempfile.mkdtemp(), "model.pt")
net = nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(5)])
torch.save(net.state_dict(), path)
net.to("simgpu:0")
# %%
state = torch.load(path, map_location="simgpu:0")
net.load_state_dict(state)
