# The same through torch.tensor.
# verdict: shortage
# advice: Keep table in float32 on the device
# %%
import numpy as np

table = np.ones((10, 1 << 20))
other = torch.zeros(60 << 20, dtype=torch.uint8, device="simgpu:0")
# %%
x = torch.tensor(table, device="simgpu:0")
print(x[0, 0], other[0])
