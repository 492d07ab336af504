# Hooks keep the activations of every layer of a model.
# %%
deep = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(10)]).to("cuda")
activations = {}
def save(name):
    def hook(module, args, output):
        activations.setdefault(name, []).append(output)
    return hook
for name, layer in deep.named_children():
    layer.register_forward_hook(save(name))
# %%
for _ in range(20):
    x = torch.randn(256, 256, device="cuda")
    y = deep(x)
