# numpy's float64 goes to the device as it is.
# verdict: one request
# advice: Keep table in float32 on the device
# %%
import numpy as np

table = np.ones((20, 1 << 20))
# %%
x = torch.from_numpy(table).to("simgpu:0")
