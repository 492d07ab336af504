# A model moved first is trained there by the optimizer that was made before.
# asks: model
# move: cpu -> simgpu:0, 2, 60, model, --move
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
