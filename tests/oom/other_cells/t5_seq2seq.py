# A small T5 learns, with labels.
# needs: transformers
# %%
from transformers import T5Config, T5ForConditionalGeneration
t5 = T5ForConditionalGeneration(T5Config(vocab_size=4000, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, decoder_start_token_id=0)).to("cuda")
optimizer = torch.optim.AdamW(t5.parameters(), lr=1e-3)
# %%
per_device_batch = 64
src = torch.randint(1, 4000, (per_device_batch, 96)).to("cuda")
tgt = torch.randint(1, 4000, (per_device_batch, 48)).to("cuda")
loss = t5(input_ids=src, labels=tgt).loss
loss.backward()
optimizer.step()
optimizer.zero_grad()
