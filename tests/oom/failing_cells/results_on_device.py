# A loop collects its results on the device.
# verdict: shortage
# advice: Collect outs in the host's memory
# %%
net = nn.Linear(64, 64).to("simgpu:0").eval()
data = torch.randn(12, 49152, 64)
# %%
outs = []
with torch.no_grad():
    for x in data:
        out = net(x.to("simgpu:0"))
        outs.append(out)
result = torch.cat(outs)
