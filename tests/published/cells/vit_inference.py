"""ViT-base in float32 loaded, and forward on one image.

https://huggingface.co/datasets/optimum-benchmark/cuda, cuda_inference_transformers_image-classification_google
"""

import torch
from transformers import ViTConfig, ViTForImageClassification

figures = {}
net = ViTForImageClassification(ViTConfig(num_labels=1000)).to("cuda").eval()
figures["loaded, allocated"] = torch.cuda.max_memory_allocated()
figures["loaded, reserved"] = torch.cuda.max_memory_reserved()
images = torch.rand(1, 3, 224, 224).to("cuda")
with torch.no_grad():
    for _ in range(3):
        net(pixel_values=images)
figures["forward, allocated"] = torch.cuda.max_memory_allocated()
figures["forward, reserved"] = torch.cuda.max_memory_reserved()
