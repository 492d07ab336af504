# A tensor of the host stays.
y = x.cpu()
