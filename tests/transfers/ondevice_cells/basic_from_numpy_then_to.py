# From_numpy then to.
# move: cpu -> simgpu:0, 1, 56, -, .to
import numpy
y = torch.from_numpy(numpy.ones(7)).to("simgpu:0")
