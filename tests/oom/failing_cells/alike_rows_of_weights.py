# Weights by hand: their first numbers are no batch, and a smaller one breaks the products.
# memory: 24MiB
# verdict: shortage
# advice: Lower the batch
# alike: silent
# %%
data = torch.randn(3000, 256, device="simgpu:0")
# %%
first = torch.randn(256, 1024, device="simgpu:0", requires_grad=True)
second = torch.randn(1024, 10, device="simgpu:0", requires_grad=True)
loss = ((data @ first).relu() @ second).square().mean()
loss.backward()
