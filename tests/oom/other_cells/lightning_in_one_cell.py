# A LightningModule and its trainer in one cell.
# needs: lightning
# device: cuda
# %%
import lightning as L
from torch.utils.data import DataLoader, TensorDataset
class LitMLP(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(256, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10))
    def training_step(self, batch, _):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("train_loss", loss)
        return loss
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)
dataset = TensorDataset(torch.randn(8192, 256), torch.randint(0, 10, (8192,)))
# %%
loader = DataLoader(dataset, batch_size=4096)
trainer = L.Trainer(max_epochs=1, accelerator="gpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer.fit(LitMLP(), loader)
