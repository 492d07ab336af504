# Pictures are cut into patches by einops and go through attention by hand.
# needs: einops
# %%
from einops import rearrange
to_qkv = nn.Linear(192, 3 * 64, bias=False).to("cuda")
pictures = torch.rand(8, 3, 128, 128, device="cuda")
# %%
with torch.no_grad():
    patches = rearrange(pictures, "b c (h p) (w q) -> b (h w) (p q c)", p=8, q=8)
    q, k, v = to_qkv(patches).chunk(3, dim=-1)
    q, k, v = (rearrange(t, "b n (h d) -> b h n d", h=8) for t in (q, k, v))
    dots = torch.einsum("bhid,bhjd->bhij", q, k) * 8 ** -0.5
    attn = dots.softmax(dim=-1)
    out = torch.einsum("bhij,bhjd->bhid", attn, v)
