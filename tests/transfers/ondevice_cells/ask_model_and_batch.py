# A model and a batch moved first, then a step.
# asks: model,batch
# move: cpu -> simgpu:0, 2, 60, model, --move
# move: cpu -> simgpu:0, 2, 24, batch, --move
# move: simgpu:0 -> cpu, 1, 4, loss, .item
loss = (model(batch["inputs"]).argmax(1) == batch["labels"][0]).float().mean()
last = loss.item()
