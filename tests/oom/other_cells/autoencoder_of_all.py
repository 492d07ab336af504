# An autoencoder is trained on the whole of its data in each epoch.
# %%
class AutoEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(256, 512), nn.ELU(), nn.Linear(512, 16))
        self.decode = nn.Sequential(nn.Linear(16, 512), nn.ELU(), nn.Linear(512, 256))
    def forward(self, x):
        return self.decode(self.encode(x))
ae = AutoEncoder().to("cuda")
data = torch.rand(12000, 256).to("cuda")
# %%
adam = torch.optim.Adam(ae.parameters())
mse = nn.MSELoss()
for epoch in range(3):
    reconstruction = ae(data)
    loss = mse(reconstruction, data)
    adam.zero_grad()
    loss.backward()
    adam.step()
    print(f"epoch {epoch}: {loss.item():.4f}")
