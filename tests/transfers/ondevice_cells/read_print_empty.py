# A printed tensor without elements.
print(torch.empty(0))
