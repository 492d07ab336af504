# .cuda means the chosen card.
# needs: cuda
y = torch.ones(4, device="cpu").cuda()
