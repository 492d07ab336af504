# Even in half the bytes the model does not fit.
# verdict: shortage
# advice: Make the model smaller: num_layers from 24 to
# %%
def make(num_layers):
    return nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(num_layers)])


# %%
net = make(num_layers=24).to("simgpu:0")
