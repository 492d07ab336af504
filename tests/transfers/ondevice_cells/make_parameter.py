# A parameter of a device tensor.
p = torch.nn.Parameter(torch.zeros(4))
