# Inference.
# move: cpu -> simgpu:0, 2, 60, model, Module.to
# move: simgpu:0 -> cpu, 1, 24, -, .cpu
with torch.inference_mode():
    out = model.to("simgpu:0")(torch.ones(2, 4)).cpu()
