# The perplexity of a long text, all windows in a batch.
# needs: transformers
# %%
from transformers import GPT2Config, GPT2LMHeadModel
lm = GPT2LMHeadModel(GPT2Config(vocab_size=5000, n_embd=128, n_layer=2, n_head=4, n_positions=256)).to("cuda").eval()
encodings = torch.randint(0, 5000, (1, 4096))
# %%
nlls, stride = [], 1024
for begin in range(0, encodings.size(1), stride):
    input_ids = encodings[:, begin : begin + stride].view(-1, 256).to("cuda")
    with torch.no_grad():
        outputs = lm(input_ids, labels=input_ids)
    nlls.append(outputs.loss)
ppl = torch.exp(torch.stack(nlls).mean())
