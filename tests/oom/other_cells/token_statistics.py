# Surprisal of each token, of logits that are kept as probabilities.
# needs: transformers
# %%
from transformers import GPT2Config, GPT2LMHeadModel
gpt = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=4, n_embd=128, vocab_size=8000)).to("cuda").eval()
ids = torch.randint(0, 8000, (16, 256), device="cuda")
# %%
with torch.no_grad():
    logits = gpt(ids).logits
    probabilities = logits.float().softmax(-1)
    surprisal = -probabilities.log().gather(-1, ids[..., None]).squeeze(-1)
