# Under a guard of memory.
# move: cpu -> simgpu:0, 1, 4000, x, .to
import gpumagic
with gpumagic.oomguard():
    y = x.to("simgpu:0")
