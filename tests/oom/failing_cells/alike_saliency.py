# A model in eval mode whose gradient is wanted, for its input.
# memory: 16MiB
# alike: silent
# verdict: shortage
# advice: Evaluate without an autograd graph
# %%
net = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(20)]).to("simgpu:0").eval()
image = torch.randn(4096, 64, device="simgpu:0", requires_grad=True)
# %%
hidden = net[:10](image)
score = net[10:](hidden).sum()
saliency, = torch.autograd.grad(score, image)
