# A checkpoint of model and optimizer, back onto the card.
# move: simgpu:0 -> cpu, 4, 120, -, torch.save
# move: cpu -> simgpu:0, 2, 60, -, copy_
# move: cpu -> simgpu:0, 2, 60, -, .to
import io
net = torch.nn.Linear(4, 3)
opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
net(torch.ones(2, 4)).sum().backward()
opt.step()
file = io.BytesIO()
torch.save({"net": net.state_dict(), "opt": opt.state_dict()}, file)
file.seek(0)
kept = torch.load(file, map_location="cpu")
net.load_state_dict(kept["net"])
opt.load_state_dict(kept["opt"])
