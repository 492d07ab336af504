import torch
from torch import nn

layer = nn.TransformerEncoderLayer(128, 4, 256, batch_first=True)
model = nn.Sequential(nn.Embedding(500, 128), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(128, 500)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
# %%
length = 16
for epoch in range(5):
    for _ in range(2):
        tokens = torch.randint(0, 500, (16, length + 1), device="cuda")
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    length = min(160, int(length * 1.7))
