# reads: truth=True
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

model = GPT2LMHeadModel(GPT2Config(vocab_size=1000, n_positions=64, n_embd=128, n_layer=2, n_head=4))
rows = [{"input_ids": (ids := torch.randint(0, 1000, (64,))), "labels": ids} for _ in range(32)]
# %%
args = TrainingArguments(
    tempfile.mkdtemp(), max_steps=3, per_device_train_batch_size=4, gradient_accumulation_steps=2, bf16=True,
    gradient_checkpointing=True, report_to=[], disable_tqdm=True, save_strategy="no", max_grad_norm=1.0,
)
Trainer(model=model, args=args, train_dataset=rows).train()
