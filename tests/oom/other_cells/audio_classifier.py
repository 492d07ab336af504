# Convolutions over raw audio.
# %%
audio = nn.Sequential(nn.Conv1d(1, 16, 64, 4), nn.ReLU(), nn.Conv1d(16, 32, 16, 4), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(32, 35)).to("cuda")
adam = torch.optim.Adam(audio.parameters())
# %%
BATCH = 128
for step in range(2):
    wav = torch.randn(BATCH, 1, 16000).to("cuda")
    label = torch.randint(0, 35, (BATCH,)).to("cuda")
    adam.zero_grad()
    nn.functional.cross_entropy(audio(wav), label).backward()
    adam.step()
