# A segmentation model of torchvision returns a dict.
# needs: torchvision
# %%
from torchvision.models.segmentation import lraspp_mobilenet_v3_large
seg = lraspp_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=4).to("cuda")
optimizer = torch.optim.AdamW(seg.parameters(), lr=1e-4)
# %%
seg.train()
pixels = torch.rand(8, 3, 128, 128, device="cuda")
masks = torch.randint(0, 4, (8, 128, 128), device="cuda")
out = seg(pixels)["out"]
loss = F.cross_entropy(out, masks)
optimizer.zero_grad()
loss.backward()
optimizer.step()
