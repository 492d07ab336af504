# Evaluation in batches, without a graph, that are too large.
# verdict: shortage
# advice: Lower eval_batch_size from 16384 to
# tight: yes
# %%
net = nn.Sequential(nn.Linear(32, 1024), nn.ReLU(), nn.Linear(1024, 10)).to("simgpu:0").eval()
data = torch.randn(32768, 32)
# %%
eval_batch_size = 16384
right = 0
with torch.no_grad():
    for start in range(0, len(data), eval_batch_size):
        out = net(data[start : start + eval_batch_size].to("simgpu:0"))
        right += (out.argmax(1) == 0).sum().item()
