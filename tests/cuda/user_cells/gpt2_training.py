import torch
from transformers import GPT2Config, GPT2LMHeadModel

config = GPT2Config(vocab_size=1000, n_positions=128, n_embd=128, n_layer=3, n_head=4)
model = GPT2LMHeadModel(config).to("cuda")
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

model.train()
for step in range(3):
    input_ids = torch.randint(0, 1000, (4, 64)).to("cuda")
    outputs = model(input_ids, labels=input_ids)
    outputs.loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
