# Under another run on a device.
# move: simgpu:1 -> simgpu:0, 1, 12, y, .to
import gpumagic
with gpumagic.ondevice("simgpu:1"):
    y = torch.zeros(3)
z = y.to("simgpu:0")
