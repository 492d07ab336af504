# A dict moved one by one.
# move: cpu -> simgpu:0, 2, 20, ?, .to
batch = {"a": torch.ones(2, device="cpu"), "b": torch.ones(3, device="cpu")}
batch = {key: value.to("simgpu:0") for key, value in batch.items()}
