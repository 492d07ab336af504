import torch
from transformers import Adafactor, T5Config, T5ForConditionalGeneration

config = T5Config(
    vocab_size=2000, d_model=128, d_kv=32, d_ff=256, num_layers=2, num_heads=4, decoder_start_token_id=0, pad_token_id=0
)
# %%
model = T5ForConditionalGeneration(config).cuda()
optimizer = Adafactor(model.parameters(), lr=1e-3, relative_step=False, scale_parameter=False)
model.train()
for _ in range(2):
    source = torch.randint(1, 2000, (8, 48), device="cuda")
    target = torch.randint(1, 2000, (8, 24), device="cuda")
    out = model(input_ids=source, labels=target)
    out.loss.backward()
    optimizer.step()
    optimizer.zero_grad()
