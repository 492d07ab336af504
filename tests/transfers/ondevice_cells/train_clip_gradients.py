# Gradients clipped.
# move: simgpu:0 -> cpu, 1, 4, -, .item
net = torch.nn.Linear(10, 2)
net(torch.ones(3, 10)).sum().backward()
norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0).item()
