"""`%devices`: the live tensors and what holds them."""
