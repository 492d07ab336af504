# Images of bytes are normalized on the device, all at once.
# %%
images = torch.randint(0, 255, (600, 3, 96, 96), dtype=torch.uint8)
mean = torch.tensor([0.485, 0.456, 0.406], device="cuda").view(1, 3, 1, 1)
std = torch.tensor([0.229, 0.224, 0.225], device="cuda").view(1, 3, 1, 1)
# %%
batch = images.to("cuda").float() / 255
batch = (batch - mean) / std
small = F.interpolate(batch, size=(48, 48), mode="bilinear")
