# Every second row from card to card.
# move: simgpu:1 -> simgpu:0, 1, 60, -, .to
y = far[::2].to("simgpu:0")
