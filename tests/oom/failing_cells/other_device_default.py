# The same, with the device given by torch's default.
# verdict: other process
# advice: Run the cell on simgpu:1
# strangers: 80MiB
# %%
import torch.utils._device

# %%
with torch.device("simgpu:0"):
    x = torch.ones(80 << 20, dtype=torch.uint8)
