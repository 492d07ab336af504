# reads: truth=True
import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

config = BertConfig(vocab_size=500, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128)
dataset = [
    {"input_ids": torch.randint(0, 500, (32,)), "attention_mask": torch.ones(32, dtype=torch.long), "labels": i % 2}
    for i in range(16)
]
args = TrainingArguments(
    output_dir=tempfile.mkdtemp(), max_steps=2, per_device_train_batch_size=4, report_to=[], disable_tqdm=True,
    save_strategy="no", logging_strategy="no",
)
trainer = Trainer(model=BertForSequenceClassification(config), args=args, train_dataset=dataset)
trainer.train()
