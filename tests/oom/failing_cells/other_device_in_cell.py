# The same, with the device written in the cell and a tensor to move.
# verdict: other process
# advice: Run the cell on simgpu:1, with table moved there
# strangers: 60MiB
# %%
table = torch.ones(40 << 20, dtype=torch.uint8, device="simgpu:0")
# %%
x = torch.ones(40 << 20, dtype=torch.uint8, device="simgpu")
(table[:100] + x[:100]).sum().item()
