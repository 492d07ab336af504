# Modules are born on the device.
net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.Embedding(3, 2))
