# Gradients go along.
# move: cpu -> simgpu:0, 4, 120, model, Module.to
model(torch.ones(2, 4, device="cpu")).sum().backward()
model.to("simgpu:0")
