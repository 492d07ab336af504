# A model that has been trained brings gradients and its optimizer's state.
# asks: model
# move: cpu -> simgpu:0, 4, 120, model, --move
# move: cpu -> simgpu:0, 4, 120, optimizer, --move
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
