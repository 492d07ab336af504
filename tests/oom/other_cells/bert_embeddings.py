# Embeddings of sentences are collected, whole hidden states and graphs included.
# needs: transformers
# %%
from transformers import BertConfig, BertModel
encoder = BertModel(BertConfig(vocab_size=3000, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256)).to("cuda").eval()
sentences = torch.randint(0, 3000, (512, 64))
# %%
embeddings = []
for ids in sentences.split(32):
    outputs = encoder(input_ids=ids.to("cuda"))
    embeddings.append(outputs.last_hidden_state)
embeddings = torch.cat(embeddings).mean(1)
