# A mask filled.
g.masked_fill_(g > 0, 2.0)
