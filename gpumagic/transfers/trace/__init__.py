"""What `--trace` adds to a run: time and memory line by line.

Python says which line begins and ends, and only the time is noted then. The allocator's own history says afterwards
what was allocated while a line ran. All figures of a line include those of what it calls.

    events.py      which line runs, of the cell and of the functions that `--trace=FUNCTION,...` names
    lines.py       how often and how long each line runs, and from when to when
    run.py         the trace of one run, and its report
"""
