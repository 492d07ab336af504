import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

config = BertConfig(vocab_size=1000, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256)
rows = [{"input_ids": torch.randint(0, 1000, (48,)), "labels": i % 2} for i in range(24)]
model = BertForSequenceClassification(config)
# %%
args = TrainingArguments(
    output_dir=tempfile.mkdtemp(), num_train_epochs=2, per_device_train_batch_size=8, per_device_eval_batch_size=8,
    eval_strategy="epoch", save_strategy="epoch", logging_steps=1, report_to=[], disable_tqdm=True,
)
trainer = Trainer(model=model, args=args, train_dataset=rows, eval_dataset=rows[:16])
trainer.train()
metrics = trainer.evaluate()
