"""The rules behind the advice of `%%oomguard`: pure functions from facts to suggestions.

Start with `verdict.py`: it runs all rules and ranks what they propose. A rule reads a `Facts` record and nothing
else, so it can be tested with a record written by hand.

    facts.py        the record of a failure that every rule reads
    verdict.py      the cause in one sentence, and the suggestions, best first
    proposal.py     what rules share: regions of code, estimates of how memory grows, making of a suggestion
    batch.py        a smaller batch, part of the data, a shallower model, another device
    kept.py         names, gradients, graphs and results that are kept without need
    training.py     optimizer state, precision, checkpointing, the logits of the loss
    expressions.py  expressions that make a large tensor without need
    limits.py       requests too large, caps and fragmentation of the allocator, host memory
"""
