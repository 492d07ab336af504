# A loss over a large vocabulary.
# verdict: shortage
# advice: Compute line
# %%
head = nn.Linear(32, 20000, bias=False).to("simgpu:0")
hidden = torch.randn(512, 32, device="simgpu:0", requires_grad=True)
labels = torch.zeros(512, dtype=torch.long, device="simgpu:0")
# %%
logits = head(hidden).float()
loss = F.cross_entropy(logits, labels)
loss.backward()
