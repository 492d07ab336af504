# A number on the host may take part.
y = g * torch.tensor(2.0, device="cpu")
