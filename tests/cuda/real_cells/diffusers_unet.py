import torch
from diffusers import DDPMScheduler, UNet2DModel

unet = UNet2DModel(
    sample_size=16, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(32, 64), norm_num_groups=8,
    down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
).cuda()
noise_scheduler = DDPMScheduler(num_train_timesteps=1000)
# %%
optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-4)
for step in range(2):
    clean = torch.randn(8, 3, 16, 16).cuda()
    noise = torch.randn_like(clean)
    timesteps = torch.randint(0, 1000, (8,), device=clean.device)
    noisy = noise_scheduler.add_noise(clean, noise, timesteps)
    loss = torch.nn.functional.mse_loss(unet(noisy, timesteps).sample, noise)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
