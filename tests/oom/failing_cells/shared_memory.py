# Workers of an earlier cell's DataLoader run out of shared memory.
# verdict: shared memory
# advice: Load the batches without worker processes
# %%
class Images(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        if torch.utils.data.get_worker_info() is not None:
            raise RuntimeError("unable to write to file </torch_12_3_4>: No space left on device (28)")
        return torch.zeros(3)


loader = torch.utils.data.DataLoader(Images(), batch_size=2, num_workers=1)
# %%
total = sum(batch.sum().item() for batch in loader)
