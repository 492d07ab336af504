# A language model of words: an LSTM goes over the text in stretches of `bptt`, its state is carried on.
# %%
class WordModel(nn.Module):
    def __init__(self, words, width):
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.rnn = nn.LSTM(width, width, batch_first=True)
        self.out = nn.Linear(width, words)
    def forward(self, x, state):
        y, state = self.rnn(self.embedding(x), state)
        return self.out(y), state
vocab = 4000
model = WordModel(vocab, 64).to("cuda")
text = torch.randint(0, vocab, (32, 400))
# %%
bptt = 50
opt = torch.optim.SGD(model.parameters(), lr=1.0)
state = None
for i in range(0, text.size(1) - bptt, bptt):
    x, y = text[:, i : i + bptt].to("cuda"), text[:, i + 1 : i + 1 + bptt].to("cuda")
    logits, state = model(x, state)
    state = tuple(s.detach() for s in state)
    loss = nn.CrossEntropyLoss()(logits.reshape(-1, vocab), y.reshape(-1))
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    opt.step()
    if i > 100:
        break
