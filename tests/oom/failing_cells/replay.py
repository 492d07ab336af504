# A replay buffer on the device that is longer than needed by any batch.
# memory: 64MiB
# verdict: shortage
# advice: Collect buffer in the host
# %%
policy = nn.Linear(512, 4).to("simgpu:0")
frames = torch.randn(40, 1024, 512)
# %%
buffer = []
with torch.no_grad():
    for frame in frames:
        state = frame.to("simgpu:0")
        action = policy(state).argmax(1)
        buffer.append(state)
