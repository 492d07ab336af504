import queue
import threading

import torch
from torch import nn

model = nn.Sequential(nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 10)).cuda()
host = [torch.randn(512, 1024) for _ in range(12)]
# %%
ready = queue.Queue(maxsize=2)


def fetch():
    for batch in host:
        ready.put(batch.cuda(non_blocking=True))
    ready.put(None)


total = 0.0
fetcher = threading.Thread(target=fetch, daemon=True)
fetcher.start()
fetcher.join(timeout=1.0)
while (batch := ready.get()) is not None:
    loss = model(batch).square().mean()
    loss.backward()
    model.zero_grad()
    del batch
