# Moves inside a function of the cell.
# move: cpu -> simgpu:0, 2, 4000, batch, .to
def prepare(batch):
    return batch.to("simgpu:0")
for start in range(0, 100, 50):
    out = prepare(x[start:start + 50])
