# Another process has most of the device; the other device is free.
# verdict: other process
# advice: Run the cell on simgpu:1
# strangers: 80MiB
# %%
device = "simgpu:0"
# %%
x = torch.ones(80 << 20, dtype=torch.uint8, device=device)
