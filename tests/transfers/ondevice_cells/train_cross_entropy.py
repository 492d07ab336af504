# A loss with labels from the host.
# move: cpu -> simgpu:0, 1, 4000, x, .to
# move: cpu -> simgpu:0, 1, 800, labels, .to
net = torch.nn.Linear(10, 2)
labels = torch.zeros(100, dtype=torch.int64, device="cpu")
loss = torch.nn.functional.cross_entropy(net(x.to("simgpu:0")), labels.to("simgpu:0"))
loss.backward()
