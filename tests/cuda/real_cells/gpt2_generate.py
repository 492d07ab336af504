# reads: truth=then FFFTFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFF
import torch
from transformers import GPT2Config, GPT2LMHeadModel

model = GPT2LMHeadModel(GPT2Config(vocab_size=2000, n_positions=128, n_embd=256, n_layer=4, n_head=4)).cuda().eval()
prompt = torch.randint(0, 2000, (8, 16))
# %%
with torch.no_grad():
    out = model.generate(prompt.cuda(), max_new_tokens=40, do_sample=False, pad_token_id=0)
