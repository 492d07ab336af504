# All of the data through a model at once, without a graph.
# verdict: shortage
# advice: Compute line 3 with
# %%
net = nn.Sequential(nn.Linear(32, 1024), nn.ReLU(), nn.Linear(1024, 10)).to("simgpu:0").eval()
x = torch.randn(16384, 32, device="simgpu:0")
# %%
with torch.no_grad():
    predictions = net(x).argmax(1)
