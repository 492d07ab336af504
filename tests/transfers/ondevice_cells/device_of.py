# The device of another tensor by its context.
# move: simgpu:1 -> cpu, 1, 12, y, .cpu
with torch.simgpu.device_of(far):
    y = torch.zeros(3, device="simgpu")
z = y.cpu()
