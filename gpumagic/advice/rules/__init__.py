"""The rules behind the advice of `%%oomguard`: pure functions from facts to suggestions.

A rule reads a `Facts` record and nothing else, so it can be tested with a record written by hand. What a suggestion
saves is for the dry runs to tell: no rule estimates.

    verdict.py      the cause in one sentence

  rules, by what they change
    batch.py        a smaller batch, part of the data, other numbers
    parts.py        smaller parts of what a loop goes through
    rows.py         a part of the rows of an expression at a time
    loops.py        training loops: gradients of small batches added up, what libraries' trainers are told
    loss.py         how a loss is made of rows, and what divides it among parts of the data
    kept.py         names, old values and autograd graphs that are kept without need
    collected.py    what a loop collects without need: graphs, results, a tensor that grows
    training.py     optimizer state, precision, checkpointing, the logits of the loss
    expressions.py  expressions that make a large tensor without need, and what computes the same without
    limits.py       requests too large, caps and fragmentation of the allocator, host memory, other devices

  what they are made with
    proposal.py     making of a suggestion, suggestions with a number to be found, rules that are data
    regions.py      where the work is in a cell's code: the forward pass, the loop around a line, calls of models
    patterns.py     expressions recognised by example: whether code computes what a pattern says
    inlining.py     what several statements compute, as one expression
    additions.py    what loops and functions add to variables
    row_reader.py   what the rows of an expression are computed from
"""
