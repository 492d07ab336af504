# Messages of all edges are made before they are added up.
# %%
class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.message = nn.Sequential(nn.Linear(2 * width, width), nn.ReLU())
        self.update = nn.Linear(2 * width, width)
    def forward(self, h, src, dst):
        m = self.message(torch.cat([h[src], h[dst]], dim=-1))
        gathered = torch.zeros_like(h).index_add_(0, dst, m)
        return torch.relu(self.update(torch.cat([h, gathered], dim=-1)))
class GNN(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.layers = nn.ModuleList([Layer(width) for _ in range(3)])
        self.out = nn.Linear(width, 2)
    def forward(self, h, src, dst):
        for layer in self.layers:
            h = layer(h, src, dst)
        return self.out(h)
gnn = GNN().to("cuda")
node_features = torch.randn(5000, 32, device="cuda")
src, dst = torch.randint(0, 5000, (2, 60000), device="cuda")
labels = torch.randint(0, 2, (5000,), device="cuda")
# %%
optimizer = torch.optim.Adam(gnn.parameters(), lr=0.01)
for epoch in range(2):
    optimizer.zero_grad()
    out = gnn(node_features, src, dst)
    loss = F.cross_entropy(out, labels)
    loss.backward()
    optimizer.step()
