# Activations a little too large, of data that cannot be divided: one long sequence through one network.
# memory: 60MiB
# verdict: shortage
# advice: Compute the forward pass in bfloat16
# %%
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(60))

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.mean()


net = Net().to("simgpu:0")
table = torch.randn(1, 4096, 64, device="simgpu:0")


# %%
def step(table):
    net(table[0]).backward()


step(table)
