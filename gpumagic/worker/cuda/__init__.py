"""A dry run on torch's own CUDA: its allocator, copies and streams, over a runtime without a GPU.

run.py         one dry run, from unpacking the notebook to the outcome
allocator.py   puts back what the notebook holds, and tells the allocator's history as a ledger
"""
