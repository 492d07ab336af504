# A GAN whose discriminator step goes back through the generator and keeps its graph.
# memory: 63MiB
# verdict: shortage
# advice: Freeze generator
# %%
generator = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(16)]).to("simgpu:0")
critic = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(8)]).to("simgpu:0")
optimizer = torch.optim.Adam(critic.parameters(), lr=1e-4)
# %%
batch_size = 8192
for step in range(2):
    noise = torch.randn(batch_size, 64, device="simgpu:0")
    fake = generator(noise)
    loss = critic(fake).mean() - critic(torch.randn_like(noise)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
