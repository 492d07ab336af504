# A memory format on the way.
# move: cpu -> simgpu:0, 1, 384, image, .to
image = torch.ones(2, 3, 4, 4, device="cpu")
y = image.to("simgpu:0", memory_format=torch.channels_last)
