# reads: truth=True
import torch
from transformers import BertConfig, BertForSequenceClassification

config = BertConfig(vocab_size=2000, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=512)
model = BertForSequenceClassification(config).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
lengths = [37, 64, 21, 96, 48, 80]
# %%
model.train()
for length in lengths:
    ids = torch.randint(0, 2000, (16, length)).cuda()
    mask = torch.ones_like(ids)
    labels = torch.randint(0, 2, (16,)).cuda()
    loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
