# The constructor by type.
y = torch.FloatTensor([1.0, 2.0])
