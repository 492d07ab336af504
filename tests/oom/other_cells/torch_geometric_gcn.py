# A graph network of torch_geometric over a whole graph.
# needs: torch_geometric
# %%
from torch_geometric.nn import GCNConv, SAGEConv
class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = GCNConv(64, 64), SAGEConv(64, 8)
    def forward(self, x, edge_index):
        return self.conv2(F.relu(self.conv1(x, edge_index)), edge_index)
gcn = GCN().to("cuda")
x = torch.randn(4000, 64, device="cuda")
edge_index = torch.randint(0, 4000, (2, 60000), device="cuda")
y = torch.randint(0, 8, (4000,), device="cuda")
# %%
optimizer = torch.optim.Adam(gcn.parameters(), lr=0.01)
for epoch in range(2):
    optimizer.zero_grad()
    loss = F.cross_entropy(gcn(x, edge_index), y)
    loss.backward()
    optimizer.step()
