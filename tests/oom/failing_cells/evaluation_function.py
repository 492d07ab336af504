# A function of the cell evaluates with a graph.
# memory: 16MiB
# verdict: shortage
# advice: Evaluate without an autograd graph
# %%
net = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(20)]).to("simgpu:0").eval()
x = torch.randn(4096, 64, device="simgpu:0")


# %%
def evaluate(net, x):
    """Return the accuracy.

    (a docstring whose second line is indented by two)
    """
    h = net[:10](x)
    out = net[10:](h)
    return (out.argmax(1) == 0).float().mean().item()


evaluate(net, x)
