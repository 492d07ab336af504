# Categories become columns of zeros and ones beside the numbers.
# %%
category = torch.randint(0, 500, (20000,), device="cuda")
numbers = torch.randn(20000, 20, device="cuda")
linear = nn.Linear(520, 1).to("cuda")
# %%
features = torch.cat([numbers, F.one_hot(category, 500).float()], dim=1)
with torch.no_grad():
    scores = linear(features).squeeze(1)
