"""BERT-large fine-tuned by Trainer on 512 tokens; what NVML says that is occupied, 1,343 MiB of it by the context.

https://huggingface.co/docs/transformers/v4.19.2/en/performance, later perf_train_gpu_one: all of its experiments.
"""

import torch
from transformers import BertConfig, BertForSequenceClassification
from transformers.optimization import Adafactor

checkpointing, half, batch, optimizer = (globals()[name] for name in ("checkpointing", "half", "batch", "optimizer"))
CONTEXT = 1343 << 20
"""As the page has it, after a tensor of one number."""


class KeptSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        result = torch.softmax(x, -1)
        ctx.save_for_backward(x, result)
        return result

    @staticmethod
    def backward(ctx, grad):
        x, result = ctx.saved_tensors
        return torch._softmax_backward_data(grad, result, -1, x.dtype)


def softmax(x, dim):
    """As of then, on the scores; autocast takes it in float32."""
    return KeptSoftmax.apply(x.float())


torch.nn.functional.softmax = softmax  # put back: softmax kept its input as well as its result
config = BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
config._attn_implementation = "eager"
net = BertForSequenceClassification(config).to("cuda")
figures = {"loaded": CONTEXT + torch.cuda.memory_reserved()}
net.train()
if checkpointing:
    net.gradient_checkpointing_enable()
    net.config.use_cache = False
if optimizer == "adafactor":
    steps = Adafactor(net.parameters(), lr=5e-5, scale_parameter=False, relative_step=False)
else:
    steps = torch.optim.AdamW(net.parameters(), lr=5e-5, foreach=False)  # put back: AdamW took tensor after tensor
scaler = torch.amp.GradScaler("cuda", enabled=half)
for _ in range(3):
    for _ in range(4 // batch):
        inputs = {
            "input_ids": torch.zeros(batch, 512, dtype=torch.int64).to("cuda"),
            "labels": torch.zeros(batch, dtype=torch.int64).to("cuda"),
        }
        with torch.autocast("cuda", dtype=torch.float16, enabled=half):
            loss = net(**inputs).loss
        scaler.scale(loss / (4 // batch)).backward()
    scaler.unscale_(steps)
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    scaler.step(steps)
    scaler.update()
    net.zero_grad(set_to_none=False)  # put back: gradients were set to zero, not to None
figures["occupied"] = CONTEXT + torch.cuda.max_memory_reserved()
