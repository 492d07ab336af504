"""What `--trace` adds to a run: time, memory, transfers and syncs, line by line; time and memory by module.

Python says which line begins and ends; the allocator's running sums, read then, say what it took, and its history what
was highest meanwhile and what for. All figures of a line include those of what it calls.

    events.py      which line runs, of the cell and of the functions that `--trace=FUNCTION,...` names
    lines.py       the running sums, and their differences by line
    modules.py     the same by module
    memory.py      the allocator's history with lines and modules: the peak of each line, a ledger of blocks
    run.py         the trace of one run
    report.py      the records; `view.py` shows them
"""
