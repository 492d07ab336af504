# Copy_ within.
z = torch.empty(8, 4)
z.copy_(g)
