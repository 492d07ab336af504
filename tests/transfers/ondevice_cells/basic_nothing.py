# Nothing.
y = torch.zeros(10)
