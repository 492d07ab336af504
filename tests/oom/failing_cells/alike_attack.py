# An attack: the input is what is optimized, by a function that an earlier cell defines.
# memory: 16MiB
# alike: silent
# verdict: shortage
# advice: Evaluate without an autograd graph
# %%
net = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(20)]).to("simgpu:0").eval()
delta = torch.zeros(4096, 64, device="simgpu:0", requires_grad=True)
def improve(score):
    score.backward()
# %%
hidden = net[:10](delta)
score = net[10:](hidden).sum()
improve(score)
