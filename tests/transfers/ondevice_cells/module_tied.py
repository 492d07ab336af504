# A tied weight; where torch must replace parameters, as on simgpu, it copies each place (on CUDA once).
# move: cpu -> simgpu:0, 2, 128, both, Module.to
a = torch.nn.Linear(4, 4, bias=False, device="cpu")
b = torch.nn.Linear(4, 4, bias=False, device="cpu")
b.weight = a.weight
both = torch.nn.ModuleList([a, b])
both.to("simgpu:0")
