# Scalar_tensor.
y = torch.scalar_tensor(3.5)
