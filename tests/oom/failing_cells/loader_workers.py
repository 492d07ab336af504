# The workers of a DataLoader run out of the host's memory.
# verdict: host memory
# advice: Load the batches without worker processes
# %%
class Images(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        if torch.utils.data.get_worker_info() is not None:
            raise MemoryError("no room for one more copy")
        return torch.zeros(3)


images = Images()
# %%
loader = torch.utils.data.DataLoader(images, batch_size=2, num_workers=1)
for batch in loader:
    pass
