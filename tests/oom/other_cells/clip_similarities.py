# Images and texts are compared by CLIP.
# needs: transformers
# %%
from transformers import CLIPConfig, CLIPModel, CLIPTextConfig, CLIPVisionConfig
text_config = CLIPTextConfig(vocab_size=1000, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=32, eos_token_id=999, bos_token_id=998, pad_token_id=997)
vision_config = CLIPVisionConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, image_size=64, patch_size=8)
clip = CLIPModel(CLIPConfig(text_config=text_config.to_dict(), vision_config=vision_config.to_dict(), projection_dim=32)).to("cuda").eval()
pixel_values = torch.rand(256, 3, 64, 64, device="cuda")
input_ids = torch.randint(0, 990, (10, 16), device="cuda")
# %%
outputs = clip(input_ids=input_ids, pixel_values=pixel_values)
probs = outputs.logits_per_image.softmax(dim=1)
