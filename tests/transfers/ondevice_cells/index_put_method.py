# Values written by `index_put_` at indices of the host.
# move: cpu -> simgpu:0, 1, 8, rows, index_put
rows = torch.tensor([1], device="cpu")
g.index_put_((rows,), torch.zeros(4), accumulate=True)
