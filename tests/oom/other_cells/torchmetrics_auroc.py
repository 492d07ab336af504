# A metric of torchmetrics keeps all that it has seen on the device.
# needs: torchmetrics
# %%
from torchmetrics.classification import MulticlassAUROC
scorer = nn.Linear(64, 200).to("cuda")
auroc = MulticlassAUROC(num_classes=200).to("cuda")
# %%
with torch.no_grad():
    for _ in range(60):
        inputs = torch.randn(1024, 64, device="cuda")
        target = torch.randint(0, 200, (1024,), device="cuda")
        auroc.update(scorer(inputs).softmax(-1), target)
