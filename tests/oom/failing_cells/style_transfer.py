# Style transfer: the features of the style image are computed with a graph that nobody needs.
# memory: 32MiB
# verdict: shortage
# advice: Evaluate without
# %%
vgg = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(16)]).to("simgpu:0").eval()
style = torch.randn(8192, 64, device="simgpu:0")
# %%
features = []
x = style
for layer in vgg:
    x = layer(x)
    if len(features) < 2:
        features.append(x.T @ x)
target = torch.stack(features)
