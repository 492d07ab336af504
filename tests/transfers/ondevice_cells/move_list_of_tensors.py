# A list moved one by one.
# move: cpu -> simgpu:0, 2, 20, ?, .to
batch = [torch.ones(2, device="cpu"), torch.ones(3, device="cpu")]
batch = [each.to("simgpu:0") for each in batch]
