"""Python's heap as a tensor sees it. Start with `holders`: from which names and other places a tensor is reached.

storages    the storages under tensors, numbered; bytes that are occupied and viewed
kinds       what tensors are for: parameters, buffers, gradients, optimizer state, what autograd graphs keep
readers     what an object holds, read without running anybody's code
holders     the search for tensors from variables, outputs, running functions and modules; names as code
references  every reference below some roots: all paths to one tensor
cycles      tensors that only a reference cycle keeps
outputs     IPython's outputs and the last error: what they keep, and how they are made to forget it
release     the memory that a failure pins
"""
