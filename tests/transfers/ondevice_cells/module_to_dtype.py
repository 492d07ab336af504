# A module there with a smaller type.
# move: cpu -> simgpu:0, 2, 30, model, Module.to
model.to("simgpu:0", torch.float16)
