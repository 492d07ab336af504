# Distillation: the teacher's outputs are recorded for a backward pass that never comes.
# memory: 32MiB
# verdict: shortage
# advice: Freeze teacher
# %%
teacher = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(16)]).to("simgpu:0").eval()
student = nn.Linear(64, 64).to("simgpu:0")
optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
data = torch.randn(32768, 64)
# %%
batch_size = 8192
for start in range(0, len(data), batch_size):
    x = data[start : start + batch_size].to("simgpu:0")
    loss = F.mse_loss(student(x), teacher(x))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
