# A small vision transformer of timm is trained with a loader.
# needs: timm
# %%
import timm
from torch.utils.data import DataLoader, TensorDataset
vit = timm.create_model("vit_tiny_patch16_224", img_size=64, patch_size=8, num_classes=10, depth=6).to("cuda")
dataset = TensorDataset(torch.rand(128, 3, 64, 64), torch.randint(0, 10, (128,)))
# %%
train_loader = DataLoader(dataset, batch_size=64, shuffle=True, drop_last=True)
optimizer = torch.optim.AdamW(vit.parameters(), lr=1e-3, weight_decay=0.05)
for epoch in range(1):
    for img, label in train_loader:
        img, label = img.to("cuda"), label.to("cuda")
        optimizer.zero_grad()
        loss = F.cross_entropy(vit(img), label)
        loss.backward()
        optimizer.step()
