# A model in eval mode, and a graph that nobody needs.
# memory: 16MiB
# verdict: shortage
# advice: Evaluate without an autograd graph
# %%
net = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(20)]).to("simgpu:0")
x = torch.randn(4096, 64, device="simgpu:0")
# %%
net.eval()
h = net[:10](x)
out = net[10:](h)
accuracy = (out.argmax(1) == 0).float().mean().item()
