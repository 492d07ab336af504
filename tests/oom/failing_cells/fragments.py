# What survives lies scattered: no gap is large enough.
# verdict: fragmentation
# advice: Move what is there to the host and back
# %%
kept = [torch.ones(9 << 20, dtype=torch.uint8, device="simgpu:0") for _ in range(12)][::2]
# %%
x = torch.ones(40 << 20, dtype=torch.uint8, device="simgpu:0")
print(sum(int(each[0]) for each in kept))
