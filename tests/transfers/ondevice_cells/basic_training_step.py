# Training step.
# move: cpu -> simgpu:0, 2, 8000, x, .to
# move: simgpu:0 -> cpu, 1, 4, loss, .item
net = torch.nn.Linear(10, 2)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for start in range(0, 100, 50):
    loss = net(x.to("simgpu:0")[start:start + 50]).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
last = loss.item()
