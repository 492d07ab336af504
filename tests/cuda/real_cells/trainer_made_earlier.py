import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

model = GPT2LMHeadModel(GPT2Config(vocab_size=4000, n_positions=128, n_embd=128, n_layer=4, n_head=4))
rows = [{"input_ids": (ids := torch.randint(0, 4000, (96,))), "labels": ids} for _ in range(64)]
args = TrainingArguments(
    output_dir=tempfile.mkdtemp(), max_steps=2, per_device_train_batch_size=32, report_to=[], disable_tqdm=True,
    save_strategy="no", logging_strategy="no",
)
trainer = Trainer(model=model, args=args, train_dataset=rows)
# %%
trainer.train()
