# A second model is loaded beside the first, which the cell does not use.
# memory: 48MiB
# verdict: leftovers
# advice: Move small to the CPU
# %%
small = nn.Sequential(*[nn.Linear(500, 500, bias=False) for _ in range(24)]).to("simgpu:0")
# %%
large = nn.Sequential(*[nn.Linear(500, 500, bias=False) for _ in range(36)]).to("simgpu:0")
