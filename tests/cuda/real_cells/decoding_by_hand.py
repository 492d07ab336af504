import torch
from transformers import GPT2Config, GPT2LMHeadModel

model = GPT2LMHeadModel(GPT2Config(vocab_size=2000, n_positions=128, n_embd=256, n_layer=4, n_head=4)).cuda().eval()
# %%
ids = torch.randint(0, 2000, (16, 8), device="cuda")
past, token = None, ids
with torch.inference_mode():
    for _ in range(48):
        out = model(token, past_key_values=past, use_cache=True)
        past = out.past_key_values
        token = out.logits[:, -1].softmax(-1).multinomial(1)
        ids = torch.cat([ids, token], dim=1)
