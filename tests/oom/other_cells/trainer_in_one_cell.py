# transformers' Trainer, made and run in one cell.
# needs: transformers accelerate
# device: cuda
# %%
from transformers import DistilBertConfig, DistilBertForSequenceClassification, Trainer, TrainingArguments
rows = [{"input_ids": torch.randint(0, 2000, (64,)), "attention_mask": torch.ones(64, dtype=torch.long), "labels": i % 2} for i in range(192)]
# %%
model = DistilBertForSequenceClassification(DistilBertConfig(vocab_size=2000, dim=128, n_layers=2, n_heads=4, hidden_dim=256))
args = TrainingArguments("/tmp/out", per_device_train_batch_size=96, num_train_epochs=1, report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True)
trainer = Trainer(model=model, args=args, train_dataset=rows)
trainer.train()
