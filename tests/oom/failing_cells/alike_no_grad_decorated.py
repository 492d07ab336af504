# The function that evaluates switches the graph off itself.
# memory: 4MiB
# alike: silent
# verdict: shortage
# advice: Evaluate without an autograd graph
# %%
net = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)]).to("simgpu:0").eval()
x = torch.randn(4096, 64, device="simgpu:0")
@torch.inference_mode()
def evaluate(net, x):
    h = net[:2](x)
    return net[2:](h), h, x.clone(), x.clone()
# %%
out = evaluate(net, x)
