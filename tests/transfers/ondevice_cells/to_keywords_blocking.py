# A conversion on the way, waited for: the host converts first.
# move: cpu -> simgpu:0, 1, 2000, x, .to
y = x.to(device="simgpu:0", dtype=torch.float16)
