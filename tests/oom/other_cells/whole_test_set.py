# The whole test set goes through a model of the user's own class.
# %%
class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 256), nn.ReLU())
        self.head = nn.Linear(256, 10)
    def forward(self, x):
        return self.head(self.body(x))
model = Classifier().to("cuda")
X_test = torch.randn(20000, 64, device="cuda")
y_test = torch.randint(0, 10, (20000,), device="cuda")
# %%
model.eval()
logits = model(X_test)
accuracy = (logits.argmax(dim=1) == y_test).float().mean().item()
