# A stack of device tensors.
y = torch.stack([torch.ones(2), torch.zeros(2)])
