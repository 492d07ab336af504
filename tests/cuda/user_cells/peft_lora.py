import torch
from peft import LoraConfig, TaskType, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

base = LlamaForCausalLM(
    LlamaConfig(vocab_size=1000, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4)
)
lora = LoraConfig(task_type=TaskType.CAUSAL_LM, r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"])
model = get_peft_model(base, lora).to("cuda")
model.print_trainable_parameters()

optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-4)
batch = torch.randint(0, 1000, (2, 32), device="cuda")
for _ in range(2):
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
