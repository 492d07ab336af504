# The model itself does not fit in float32.
# verdict: shortage
# advice: Keep the model's parameters in bfloat16
# %%
net = nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(9)])
# %%
net = net.to("simgpu:0")
