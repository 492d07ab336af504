"""The rules behind the advice of `%%oomguard`: pure functions from facts to suggestions.

A rule reads a `Facts` record and nothing else, so it can be tested with a record written by hand. What a suggestion
saves is for the dry runs to tell: no rule estimates.

    facts.py        the record of a failure that every rule reads
    verdict.py      the cause in one sentence
    proposal.py     what rules share: regions of code, making of a suggestion, suggestions with a number to be found
    batch.py        a smaller batch, part of the data, a shallower model
    accumulation.py gradients of several small batches added up before each step
    devices.py      another device, several of them, a larger one
    kept.py         names, gradients and copies that are kept without need
    collected.py    what a loop collects without need: graphs, results, a tensor that grows
    graphs.py       autograd graphs that are kept without need
    training.py     optimizer state, precision, checkpointing, the logits of the loss
    expressions.py  expressions that make a large tensor without need
    rows.py         expressions that can be computed a part of the rows at a time
    trainers.py     arguments of Hugging Face's and Lightning's trainers
    joined.py       several statements seen as one expression
    patterns.py     code recognised by example
    limits.py       requests too large, caps and fragmentation of the allocator, host memory
"""
