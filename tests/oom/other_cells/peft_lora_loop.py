# LoRA adapters are trained with a loop of one's own.
# needs: transformers peft
# %%
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel
base = GPT2LMHeadModel(GPT2Config(vocab_size=4000, n_embd=128, n_layer=4, n_head=4, n_positions=128))
peft_model = get_peft_model(base, LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")).to("cuda")
optimizer = torch.optim.AdamW(peft_model.parameters(), lr=1e-3)
token_batches = torch.randint(0, 4000, (2, 32, 128))
# %%
for tokens in token_batches:
    tokens = tokens.to("cuda")
    loss = peft_model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
