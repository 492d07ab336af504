# Two views of each image are compared with all others.
# %%
encoder = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 256), nn.ReLU(), nn.Linear(256, 64)).to("cuda")
opt = torch.optim.SGD(encoder.parameters(), lr=0.1)
# %%
bs = 1024
images = torch.rand(bs, 3, 32, 32, device="cuda")
z = F.normalize(torch.cat([encoder(images), encoder(images.flip(-1))]), dim=1)
sim = z @ z.T / 0.5
sim = sim.masked_fill(torch.eye(2 * bs, dtype=torch.bool, device="cuda"), -1e9)
targets = torch.arange(2 * bs, device="cuda").roll(bs)
loss = F.cross_entropy(sim, targets)
opt.zero_grad(); loss.backward(); opt.step()
