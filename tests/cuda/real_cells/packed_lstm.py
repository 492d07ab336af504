import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.lstm = nn.Embedding(2000, 64), nn.LSTM(64, 128, 2, batch_first=True, bidirectional=True)
        self.out = nn.Linear(256, 20)

    def forward(self, tokens, lengths):
        packed = pack_padded_sequence(self.words(tokens), lengths, batch_first=True, enforce_sorted=False)
        hidden, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        return self.out(hidden)


tagger = Tagger().cuda()
optimizer = torch.optim.Adam(tagger.parameters())
sentences = [torch.randint(0, 2000, (5 + 7 * i % 40,)) for i in range(64)]
# %%
for start in range(0, 64, 16):
    batch = sentences[start : start + 16]
    lengths = torch.tensor([len(each) for each in batch])
    scores = tagger(pad_sequence(batch, batch_first=True).cuda(), lengths)
    loss = nn.functional.cross_entropy(scores.flatten(0, 1), scores.new_zeros(scores.shape[:2]).long().flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
