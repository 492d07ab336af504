# A layer of attention is born there and works.
layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
out = layer(torch.ones(1, 3, 8))
