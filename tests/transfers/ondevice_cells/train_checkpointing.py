# Activations recomputed.
# move: cpu -> simgpu:0, 1, 4000, x, .to
from torch.utils.checkpoint import checkpoint
net = torch.nn.Linear(10, 10)
out = checkpoint(net, x.to("simgpu:0").requires_grad_(), use_reentrant=False)
out.sum().backward()
