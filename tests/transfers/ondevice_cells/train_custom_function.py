# A function of the user's own that moves, forward and backward.
# move: cpu -> simgpu:0, 1, 16, ?, .to
# move: simgpu:0 -> cpu, 1, 16, ?, .cpu
class There(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        return value.to("simgpu:0")

    @staticmethod
    def backward(ctx, gradient):
        return gradient.cpu()

w = torch.ones(4, device="cpu", requires_grad=True)
There.apply(w).sum().backward()
