# reads: truth=then FFFTFFFFFFFFFFFFFFFFFFFFFFFF; truth=then FFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFF
import torch
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(
    vocab_size=2000, hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=8,
    num_key_value_heads=4,
)
model = LlamaForCausalLM(config).to("cuda", torch.float16).eval()
# %%
prompts = torch.randint(3, 2000, (16, 32), device="cuda")
sampled = model.generate(prompts, max_new_tokens=24, do_sample=True, top_k=20, temperature=0.8, pad_token_id=0)
