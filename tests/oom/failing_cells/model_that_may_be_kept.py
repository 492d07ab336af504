# Only one case of the match makes a new model: it may be passed by, so the old one is not to be deleted before.
# verdict: shortage
# advice: Lower batch_size from 28000
# %%
model = nn.Linear(1024, 2048).to("simgpu:0")
fresh = False
# %%
batch_size = 28000
match fresh:
    case True:
        model = nn.Linear(1024, 2048).to("simgpu:0")
x = torch.randn(batch_size, 1024, device="simgpu:0")
model(x).sum().backward()
