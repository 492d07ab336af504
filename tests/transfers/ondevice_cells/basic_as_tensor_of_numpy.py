# As_tensor of numpy.
# move: cpu -> simgpu:0, 1, 56, -, as_tensor
import numpy
y = torch.as_tensor(numpy.ones(7))
