# nn.MultiheadAttention returns the weights that nobody looks at.
# %%
attention = nn.MultiheadAttention(64, 8, batch_first=True).to("cuda").eval()
tokens = torch.randn(4, 700, 64, device="cuda")
# %%
with torch.no_grad():
    output, weights = attention(tokens, tokens, tokens)
pooled = output.mean(1)
