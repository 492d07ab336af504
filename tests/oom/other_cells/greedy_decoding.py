# Greedy decoding without a cache goes over the whole text again for each word, and keeps the logits.
# %%
class TinyGPT(nn.Module):
    def __init__(self, vocab=2000, width=64):
        super().__init__()
        self.wte = nn.Embedding(vocab, width)
        self.block = nn.TransformerEncoderLayer(width, 4, 128, batch_first=True)
        self.lm_head = nn.Linear(width, vocab, bias=False)
    def forward(self, ids):
        return self.lm_head(self.block(self.wte(ids)))
gpt = TinyGPT().to("cuda").eval()
prompt = torch.randint(0, 2000, (32, 64), device="cuda")
# %%
ids, all_logits = prompt, []
for _ in range(8):
    logits = gpt(ids)
    all_logits.append(logits)
    ids = torch.cat([ids, logits[:, -1].argmax(-1, keepdim=True)], dim=1)
