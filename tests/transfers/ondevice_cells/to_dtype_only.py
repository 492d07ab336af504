# A change of dtype alone moves nothing.
y = g.to(torch.float64)
