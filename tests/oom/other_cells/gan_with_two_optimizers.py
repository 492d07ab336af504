# A GAN, with the images of the generator not detached where the discriminator learns.
# %%
G = nn.Sequential(nn.Linear(64, 1024), nn.LeakyReLU(0.2), nn.Linear(1024, 1024), nn.LeakyReLU(0.2), nn.Linear(1024, 784), nn.Tanh()).to("cuda")
D = nn.Sequential(nn.Linear(784, 1024), nn.LeakyReLU(0.2), nn.Linear(1024, 256), nn.LeakyReLU(0.2), nn.Linear(256, 1)).to("cuda")
opt_g, opt_d = (torch.optim.Adam(m.parameters(), lr=2e-4, betas=(0.5, 0.999)) for m in (G, D))
bce = nn.BCEWithLogitsLoss()
# %%
batch = 2048
for _ in range(2):
    real = torch.rand(batch, 784, device="cuda") * 2 - 1
    noise = torch.randn(batch, 64, device="cuda")
    fake = G(noise)
    ones, zeros = torch.ones(batch, 1, device="cuda"), torch.zeros(batch, 1, device="cuda")
    loss_d = bce(D(real), ones) + bce(D(fake), zeros)
    opt_d.zero_grad(); loss_d.backward(retain_graph=True); opt_d.step()
    loss_g = bce(D(fake), ones)
    opt_g.zero_grad(); loss_g.backward(); opt_g.step()
