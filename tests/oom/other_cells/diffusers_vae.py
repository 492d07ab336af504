# The autoencoder of latent diffusion encodes pictures.
# needs: diffusers
# %%
from diffusers import AutoencoderKL
vae = AutoencoderKL(block_out_channels=(32, 64), down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, layers_per_block=1, latent_channels=4).to("cuda").eval()
photos = torch.rand(12, 3, 64, 64, device="cuda")
# %%
with torch.no_grad():
    latents = vae.encode(photos).latent_dist.mean * 0.18215
    decoded = vae.decode(latents / 0.18215).sample
