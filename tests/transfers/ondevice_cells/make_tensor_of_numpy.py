# A tensor of numpy data.
# move: cpu -> simgpu:0, 1, 48, -, tensor
import numpy
y = torch.tensor(numpy.arange(6))
