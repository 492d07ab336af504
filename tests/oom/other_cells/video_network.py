# A network of 3D convolutions.
# %%
video_net = nn.Sequential(nn.Conv3d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool3d((1, 2, 2)), nn.Conv3d(8, 16, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(16, 4)).to("cuda")
# %%
clips = torch.rand(4, 3, 16, 64, 64).to("cuda")
labels = torch.tensor([0, 1, 2, 3]).to("cuda")
optimizer = torch.optim.SGD(video_net.parameters(), lr=0.01, momentum=0.9)
loss = F.cross_entropy(video_net(clips), labels)
loss.backward()
optimizer.step()
