# A grid.
a, b = torch.meshgrid(torch.arange(2), torch.arange(3), indexing="ij")
