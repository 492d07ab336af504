# A transformer encoder; all numbers are in a dict.
# %%
cfg = {"batch_size": 64, "seq_len": 128, "d_model": 64, "layers": 2, "classes": 5}
encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(cfg["d_model"], 4, 128, batch_first=True), cfg["layers"])
head = nn.Linear(cfg["d_model"], cfg["classes"])
encoder.to("cuda"); head.to("cuda");
# %%
params = list(encoder.parameters()) + list(head.parameters())
optim = torch.optim.AdamW(params, lr=3e-4)
for _ in range(2):
    x = torch.randn(cfg["batch_size"], cfg["seq_len"], cfg["d_model"], device="cuda")
    y = torch.randint(0, cfg["classes"], (cfg["batch_size"],), device="cuda")
    out = head(encoder(x).mean(1))
    loss = F.cross_entropy(out, y)
    optim.zero_grad(set_to_none=True)
    loss.backward()
    optim.step()
