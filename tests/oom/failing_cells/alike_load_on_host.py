# The checkpoint goes to the host already; what fails comes after.
# alike: silent
# verdict: shortage
# advice: Load
# %%
import io
file = io.BytesIO()
torch.save(torch.ones(20 << 20, dtype=torch.uint8), file)
file.seek(0)
old = torch.ones(90 << 20, dtype=torch.uint8, device="simgpu:0")
# %%
state = torch.load(file, map_location="cpu")
new = torch.cat([state, state, state]).to("simgpu:0")
print(old[0])
