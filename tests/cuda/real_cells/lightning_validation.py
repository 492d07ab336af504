import tempfile

import lightning as L
import torch
from torch import nn


class Regressor(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1))

    def training_step(self, batch, batch_idx):
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}


train = torch.utils.data.TensorDataset(torch.randn(256, 128), torch.randn(256, 1))
valid = torch.utils.data.TensorDataset(torch.randn(512, 128), torch.randn(512, 1))
# %%
trainer = L.Trainer(
    accelerator="gpu", devices=1, max_epochs=2, logger=False, enable_progress_bar=False, enable_model_summary=False,
    default_root_dir=tempfile.mkdtemp(), accumulate_grad_batches=2, gradient_clip_val=1.0, precision="bf16-mixed",
)
trainer.fit(
    Regressor(), torch.utils.data.DataLoader(train, batch_size=64, shuffle=True),
    torch.utils.data.DataLoader(valid, batch_size=256),
)
