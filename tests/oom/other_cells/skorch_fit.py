# skorch fits a module as scikit-learn would.
# needs: skorch
# device: cuda
# %%
import numpy as np
from skorch import NeuralNetClassifier
class Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(128, 2048), nn.ReLU(), nn.Linear(2048, 1024), nn.ReLU(), nn.Linear(1024, 2))
    def forward(self, X):
        return F.softmax(self.body(X), dim=-1)
X = np.random.default_rng(0).normal(size=(6000, 128)).astype("float32")
y = (X[:, 0] > 0).astype("int64")
# %%
net = NeuralNetClassifier(Module, max_epochs=1, batch_size=4096, lr=0.1, device="cuda", train_split=None, verbose=0)
net.fit(X, y)
