# Like another.
y = torch.zeros_like(g)
z = torch.randn_like(x)
