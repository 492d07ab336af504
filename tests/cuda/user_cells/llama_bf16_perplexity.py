import torch
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(
    vocab_size=1000, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2,
)
model = LlamaForCausalLM(config).to(device="cuda", dtype=torch.bfloat16).eval()
encodings = torch.randint(1, 1000, (1, 300))

nlls = []
stride = 100
for begin in range(0, encodings.size(1), stride):
    input_ids = encodings[:, begin : begin + stride].to(model.device)
    target_ids = input_ids.clone()
    with torch.no_grad():
        outputs = model(input_ids, labels=target_ids, use_cache=False)
    nlls.append(outputs.loss)
perplexity = torch.exp(torch.stack(nlls).mean()).item()
