# A loader of an earlier cell with a sampler of its own, beside a module that has not got its parameters yet.
# memory: 16MiB
# verdict: shortage
# advice: Lower loader's batch_size from 4096 to
# %%
net = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(20)]).to("simgpu:0")
lazy, numbers = nn.LazyLinear(3), list(range(10**5))
dataset = torch.utils.data.TensorDataset(torch.randn(8192, 64))
sampler = torch.utils.data.WeightedRandomSampler(torch.ones(8192), 8192)
loader = torch.utils.data.DataLoader(dataset, 4096, sampler=sampler, drop_last=True)
# %%
for (x,) in loader:
    net(x.to("simgpu:0")).square().mean().backward()
    net.zero_grad()
    assert len(numbers), lazy
assert isinstance(loader.sampler, torch.utils.data.WeightedRandomSampler), "the sampler is kept"
assert loader.drop_last
