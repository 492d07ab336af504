# A critic is trained with a gradient penalty, whose gradients are differentiated again.
# %%
critic = nn.Sequential(
    nn.Conv2d(3, 64, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(64, 128, 4, 2, 1), nn.LeakyReLU(0.2),
    nn.Flatten(), nn.Linear(128 * 8 * 8, 1),
).to("cuda")
opt_d = torch.optim.Adam(critic.parameters(), lr=1e-4, betas=(0.0, 0.9))
images = torch.rand(1024, 3, 32, 32)
# %%
batch_size = 256
for i in range(0, 512, batch_size):
    real = images[i : i + batch_size].to("cuda")
    fake = torch.rand_like(real)
    alpha = torch.rand(len(real), 1, 1, 1, device="cuda")
    mixed = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
    score = critic(mixed)
    grads = torch.autograd.grad(score.sum(), mixed, create_graph=True)[0]
    penalty = ((grads.flatten(1).norm(2, dim=1) - 1) ** 2).mean()
    d_loss = critic(fake).mean() - critic(real).mean() + 10 * penalty
    opt_d.zero_grad()
    d_loss.backward()
    opt_d.step()
