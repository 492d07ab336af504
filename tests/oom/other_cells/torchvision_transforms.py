# Pictures are resized and normalized on the device by transforms of torchvision.
# needs: torchvision
# %%
from torchvision.transforms import v2
photos = torch.randint(0, 255, (64, 3, 120, 160), dtype=torch.uint8)
prepare = v2.Compose([v2.Resize((224, 224)), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.25] * 3)])
# %%
inputs = prepare(photos.to("cuda"))
flipped = v2.functional.horizontal_flip(inputs)
both = torch.cat([inputs, flipped])
