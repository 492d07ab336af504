# The cell that makes the model is run again: the old model stays alive until the new one is bound.
# verdict: shortage
# advice: Delete the old net before the cell makes the new one
# %%
net = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(4)]).to("simgpu:0")
# %%
net = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(5)]).to("simgpu:0")
