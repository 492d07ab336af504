# Ranges.
a = torch.arange(10)
b = torch.linspace(0, 1, 5)
c = torch.eye(3)
d = torch.full((2,), 7)
