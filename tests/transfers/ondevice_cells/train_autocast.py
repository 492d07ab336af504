# Mixed precision.
# move: cpu -> simgpu:0, 1, 4000, x, .to
# move: simgpu:0 -> cpu, 1, 800, -, .cpu
net = torch.nn.Linear(10, 2)
with torch.autocast("simgpu", dtype=torch.bfloat16):
    out = net(x.to("simgpu:0"))
kept = out.float().cpu()
