# State dict.
# move: cpu -> simgpu:0, 2, 60, model, Module.to
# move: cpu -> simgpu:0, 2, 60, -, copy_
model.to("simgpu:0").load_state_dict(torch.nn.Linear(4, 3, device="cpu").state_dict())
