# A UNet of diffusers learns to remove noise.
# needs: diffusers
# %%
from diffusers import DDPMScheduler, UNet2DModel
unet = UNet2DModel(sample_size=32, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(32, 64), down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D")).to("cuda")
noise_scheduler = DDPMScheduler(num_train_timesteps=1000)
optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-4)
# %%
train_batch_size = 24
clean = torch.rand(train_batch_size, 3, 32, 32).to("cuda") * 2 - 1
noise = torch.randn(clean.shape, device="cuda")
timesteps = torch.randint(0, 1000, (clean.shape[0],), device="cuda")
noisy = noise_scheduler.add_noise(clean, noise, timesteps)
noise_pred = unet(noisy, timesteps, return_dict=False)[0]
loss = F.mse_loss(noise_pred, noise)
loss.backward()
optimizer.step()
