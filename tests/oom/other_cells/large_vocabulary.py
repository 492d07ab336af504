# The loss of a head over a large vocabulary.
# %%
class Head(nn.Module):
    def __init__(self, width=128, vocab=16000):
        super().__init__()
        self.norm, self.proj = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
    def forward(self, h, labels):
        logits = self.proj(self.norm(h)).float()
        return F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1))
lm = Head().to("cuda")
# %%
hidden = torch.randn(8, 128, 128, device="cuda")
labels = torch.randint(0, 16000, (8, 128), device="cuda")
loss = lm(hidden, labels)
loss.backward()
