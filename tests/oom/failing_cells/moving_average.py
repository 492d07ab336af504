# An exponential moving average of the weights is kept on the device beside model and optimizer.
# memory: 64MiB
# verdict: shortage
# advice: Collect what the list is made of in the host's memory
# %%
net = nn.Sequential(*[nn.Linear(500, 500, bias=False) for _ in range(20)]).to("simgpu:0")
# %%
import copy
average = [copy.deepcopy(net) for _ in range(3)]
