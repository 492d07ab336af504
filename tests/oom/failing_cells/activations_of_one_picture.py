# The activations of one large picture are kept for backward; there is no batch to lower.
# memory: 28MiB
# verdict: shortage
# advice: Keep activations in the host's memory until backward
# %%
class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third, self.last = (nn.Parameter(torch.randn(256, 256) / 16) for _ in range(4))
    def forward(self, x):
        h = (self.first @ x).tanh()
        h = (self.second @ h).tanh()
        h = (self.third @ h).tanh()
        return self.last @ h
mixed = Mixed().to("simgpu:0")
opt = torch.optim.SGD(mixed.parameters(), lr=0.1)
picture = torch.rand(256, 4096, device="simgpu:0")
# %%
opt.zero_grad()
loss = (mixed(picture) - picture).abs().mean()
loss.backward()
opt.step()
