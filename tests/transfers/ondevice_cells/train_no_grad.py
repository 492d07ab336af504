# Without gradients.
# move: cpu -> simgpu:0, 2, 60, model, Module.to
# move: simgpu:0 -> cpu, 1, 4, -, .item
with torch.no_grad():
    out = model.to("simgpu:0")(torch.ones(2, 4))
value = out.max().item()
