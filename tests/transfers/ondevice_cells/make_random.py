# Random numbers of every kind.
a = torch.rand(3)
b = torch.randn(3)
c = torch.randint(5, (3,))
d = torch.randperm(4)
