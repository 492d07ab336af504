# A change of type by .type.
y = g.type(torch.float16)
