# A trainer of the user's own, as tutorials have it.
# %%
from torch.utils.data import DataLoader, TensorDataset
class Trainer:
    def __init__(self, model, dataset, batch_size=256, lr=1e-3):
        self.model = model.to("cuda")
        self.loader = DataLoader(dataset, batch_size=batch_size, shuffle=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)
    def fit(self, epochs):
        for epoch in range(epochs):
            for x, y in self.loader:
                x, y = x.to("cuda"), y.to("cuda")
                loss = F.cross_entropy(self.model(x), y)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
            print(epoch, loss.item())
dataset = TensorDataset(torch.randn(1024, 3, 24, 24), torch.randint(0, 10, (1024,)))
def build():
    return nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12800, 10))
# %%
trainer = Trainer(build(), dataset)
trainer.fit(epochs=1)
