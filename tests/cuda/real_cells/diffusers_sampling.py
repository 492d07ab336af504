import torch
from diffusers import DDIMScheduler, UNet2DModel

unet = UNet2DModel(
    sample_size=16, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(32, 64), norm_num_groups=8,
    down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
).cuda().eval()
scheduler = DDIMScheduler(num_train_timesteps=1000)
# %%
scheduler.set_timesteps(6)
frames, images = [], torch.randn(16, 3, 16, 16, device="cuda")
with torch.no_grad():
    for t in scheduler.timesteps:
        images = scheduler.step(unet(images, t).sample, t, images).prev_sample
        frames.append(images)
grid = torch.stack(frames).clamp(-1, 1).add(1).div(2).cpu()
