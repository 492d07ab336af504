# Neither what is left over nor the results are enough to give up; both are.
# memory: 80MiB
# verdict: shortage
# advice: Collect outs in the host's memory; delete 1 name that earlier cells left
# %%
net = nn.Linear(64, 512).to("simgpu:0").eval()
earlier = torch.ones(24 << 20, dtype=torch.uint8, device="simgpu:0")
table = torch.ones(10 << 20, dtype=torch.uint8, device="simgpu:0")
data = torch.randn(20, 1024, 64)
# %%
outs = []
with torch.no_grad():
    for i, x in enumerate(data):
        scratch = torch.empty((10 + 2 * i) << 20, dtype=torch.uint8, device="simgpu:0")
        outs.append(net(x.to("simgpu:0")))
        del scratch
shape = table.shape
