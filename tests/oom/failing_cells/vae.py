# A variational autoencoder, one batch of all the images.
# memory: 48MiB
# verdict: shortage
# advice: Train on
# %%
encoder = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 64)).to("simgpu:0")
decoder = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 784)).to("simgpu:0")
images = torch.rand(4096, 784, device="simgpu:0")
# %%
code = encoder(images)
mean, spread = code[:, :32], code[:, 32:]
z = mean + torch.randn_like(mean) * (spread / 2).exp()
loss = F.binary_cross_entropy_with_logits(decoder(z), images)
loss.backward()
