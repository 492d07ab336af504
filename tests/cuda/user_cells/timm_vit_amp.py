import timm.optim
import torch

model = timm.create_model("vit_tiny_patch16_224", pretrained=False, num_classes=10, img_size=64).cuda()
optimizer = timm.optim.create_optimizer_v2(model, opt="adamw", lr=1e-3)
scaler = torch.amp.GradScaler("cuda")
loader = torch.utils.data.DataLoader(
    torch.utils.data.TensorDataset(torch.randn(8, 3, 64, 64), torch.randint(0, 10, (8,))), batch_size=4, shuffle=True, pin_memory=True
)

for images, labels in loader:
    images, labels = images.cuda(non_blocking=True), labels.cuda(non_blocking=True)
    with torch.autocast("cuda", dtype=torch.float16):
        loss = torch.nn.functional.cross_entropy(model(images), labels)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
