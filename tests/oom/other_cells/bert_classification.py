# BERT with a loop of one's own over batches that are dicts.
# needs: transformers
# %%
from transformers import BertConfig, BertForSequenceClassification
config = BertConfig(vocab_size=3000, hidden_size=128, num_hidden_layers=3, num_attention_heads=4, intermediate_size=256)
bert = BertForSequenceClassification(config).to("cuda")
from torch.utils.data import DataLoader
rows = [{"input_ids": torch.randint(0, 3000, (128,)), "attention_mask": torch.ones(128, dtype=torch.long), "labels": torch.tensor(i % 2)} for i in range(128)]
train_dataloader = DataLoader(rows, batch_size=64)
# %%
optimizer = torch.optim.AdamW(bert.parameters(), lr=5e-5)
bert.train()
for batch in train_dataloader:
    batch = {k: v.to("cuda") for k, v in batch.items()}
    outputs = bert(**batch)
    outputs.loss.backward()
    optimizer.step()
    optimizer.zero_grad()
