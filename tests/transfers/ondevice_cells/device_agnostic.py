# The device-agnostic idiom.
# move: cpu -> simgpu:0, 2, 60, model, Module.to
device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
model.to(device)
out = model(torch.ones(2, 4, device=device))
