# A move within a checkpoint, made again in backward.
# move: cpu -> simgpu:0, 2, 32, v, .to
# move: simgpu:0 -> cpu, 1, 16, -, backward
from torch.utils.checkpoint import checkpoint
w = torch.ones(4, device="cpu", requires_grad=True)
checkpoint(lambda v: v.to("simgpu:0").exp(), w, use_reentrant=False).sum().backward()
