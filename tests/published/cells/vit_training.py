"""ViT-L/16 of torchvision fine-tuned on CIFAR-10 at 224 x 224 by Fabric: training steps, then validation.

https://github.com/rasbt/pytorch-memory-optim, 01-2_pytorch-fabric.py to 06_sgd-with-scheduler.py, logs.md
"""

import torch
import torch.nn.functional as F
from lightning import Fabric
from torchvision.models import vit_l_16

_addcdiv_, _attention = torch._foreach_addcdiv_, F.scaled_dot_product_attention


def addcdiv_with_a_copy(params, averages, denominators, *more):
    _addcdiv_(params, averages, torch._foreach_add(denominators, 0), *more)


def attention_batch_by_batch(query, *others, **settings):
    result = _attention(query, *others, **settings)
    return result if query.dtype == torch.float32 else result.transpose(1, 2).contiguous().transpose(1, 2)


torch._foreach_addcdiv_ = addcdiv_with_a_copy  # put back: Adam had two temporary copies of the parameters, not one
F.scaled_dot_product_attention = attention_batch_by_batch  # put back: flash attention laid its result out anew
precision, batch, accumulated, sgd = (globals()[name] for name in ("precision", "batch", "accumulated", "sgd"))
fabric = Fabric(accelerator="cuda", devices=1, precision=precision)
fabric.launch()
model = vit_l_16()
model.heads.head = torch.nn.Linear(in_features=1024, out_features=10)
if sgd:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
else:
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-5)
model, optimizer = fabric.setup(model, optimizer)
data = [(torch.rand(batch, 3, 224, 224), torch.zeros(batch, dtype=torch.int64)) for _ in range(3 * accumulated)]
loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(data, batch_size=None))

model.train()
for step, (features, targets) in enumerate(loader):
    logits = model(features)
    loss = F.cross_entropy(logits, targets) / accumulated
    if accumulated == 1:
        optimizer.zero_grad()
    fabric.backward(loss)
    if step % accumulated == 0:
        optimizer.step()
        if accumulated > 1:
            optimizer.zero_grad()
model.eval()
with torch.no_grad():
    for features, _ in loader:
        outputs = model(features)
