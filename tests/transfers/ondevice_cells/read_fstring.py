# Numbers put into text.
# move: simgpu:0 -> cpu, 2, 8, -, format()
text = f"{g.mean():.4f} {g.sum()}"
