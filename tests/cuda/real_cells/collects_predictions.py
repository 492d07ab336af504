import torch
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models import resnet18

model = resnet18(num_classes=20).cuda().eval()
loader = DataLoader(TensorDataset(torch.randn(32, 3, 64, 64)), batch_size=8)
# %%
model = model.half()
probs, embeddings = [], []
hook = model.avgpool.register_forward_hook(lambda module, inputs, output: embeddings.append(output.flatten(1)))
with torch.inference_mode():
    for (images,) in loader:
        probs.append(model(images.cuda().half()).float().softmax(1).cpu())
hook.remove()
probs, embeddings = torch.cat(probs), torch.cat(embeddings).cpu()
best = probs.argmax(1).tolist()
