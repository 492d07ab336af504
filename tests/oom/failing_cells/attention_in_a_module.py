# Attention in the forward of a module that an earlier cell defines.
# verdict: shortage
# advice: Attend with 128 queries at a time
# %%
class Attention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        att = (q @ k.transpose(-2, -1)) * 0.25
        att = F.softmax(att, dim=-1)
        y = att @ v
        return y
block = Attention(16).to("simgpu:0").eval()
x = torch.randn(2, 3000, 16, device="simgpu:0")
# %%
with torch.no_grad():
    y = block(x)
