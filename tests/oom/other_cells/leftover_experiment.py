# An earlier experiment still has its model, optimizer and data.
# %%
old_model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024)).to("cuda")
old_opt = torch.optim.Adam(old_model.parameters())
old_x = torch.randn(4096, 1024, device="cuda")
old_out = old_model(old_x)
old_out.mean().backward(); old_opt.step()
# %%
new_model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 10)).to("cuda")
new_opt = torch.optim.SGD(new_model.parameters(), lr=0.1)
x, t = torch.randn(4096, 512, device="cuda"), torch.randint(0, 10, (4096,), device="cuda")
loss = F.cross_entropy(new_model(x), t)
loss.backward()
new_opt.step()
