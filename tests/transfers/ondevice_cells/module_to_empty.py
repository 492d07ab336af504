# A module without its values.
model.to_empty(device="simgpu:0")
