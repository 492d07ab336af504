"""The rules behind the advice of `%%oomguard`: pure functions from facts to suggestions.

A rule reads a `Facts` record and nothing else, so it can be tested with a record written by hand. What a suggestion
saves is for the dry runs to tell: no rule estimates.

    verdict.py      the cause in one sentence
    proposal.py     what rules share: regions of code, making of a suggestion, suggestions with a number to be found
    batch.py        a smaller batch, part of the data, other numbers
    parts.py        a part at a time: of what a loop goes through, of the rows of an expression
    loops.py        training loops: gradients of small batches added up, what libraries' trainers are told
    kept.py         names, old values and autograd graphs that are kept without need
    collected.py    what a loop collects without need: graphs, results, a tensor that grows
    training.py     optimizer state, precision, checkpointing, the logits of the loss
    expressions.py  expressions that make a large tensor without need, and what computes the same without
    patterns.py     expressions recognised by example: whether code computes what a pattern says
    inlining.py     what several statements compute, as one expression
    limits.py       requests too large, caps and fragmentation of the allocator, host memory, other devices
"""
