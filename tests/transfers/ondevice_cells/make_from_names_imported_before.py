# Names imported one by one.
# move: cpu -> simgpu:0, 1, 24, -, tensor
from torch import zeros, tensor
a = zeros(3)
b = tensor([1, 2, 3])
