# Numpy data to the default device.
# move: cpu -> simgpu:0, 1, 48, -, .to
import numpy
y = torch.from_numpy(numpy.ones((3, 4), dtype="float32")).to(torch.get_default_device())
