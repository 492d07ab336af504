import timm.optim
import torch

model = timm.create_model("vit_tiny_patch16_224", num_classes=10, img_size=64, depth=3).cuda()
# %%
optimizer = timm.optim.create_optimizer_v2(model, opt="lookahead_adamw", lr=1e-3)
for step in range(8):
    images, labels = torch.randn(16, 3, 64, 64).cuda(), torch.randint(0, 10, (16,)).cuda()
    loss = torch.nn.functional.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
