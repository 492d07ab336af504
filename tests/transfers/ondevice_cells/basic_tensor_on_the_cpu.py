# Tensor on the cpu.
y = torch.tensor([1.0, 2.0, 3.0], device="cpu")
