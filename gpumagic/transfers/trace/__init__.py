"""What `--trace` adds to a run: time, memory, transfers and syncs, line by line; time and memory by module.

Python says which line begins and ends; the allocator's running sums, read then and around each operator, say what it
took. All figures of a line include those of what it calls.

    events.py      which line runs: `sys.monitoring` from Python 3.12 on, `sys.settrace` before
    meter.py       the running sums: time, memory, transfers, syncs
    streams.py     what the device did meanwhile, from CUDA's events
    lines.py       their differences, by line
    modules.py     the same by module, and what each holds at the peak
    functions.py   the functions that `--trace=FUNCTION,...` names
    run.py         the trace of one run
    report.py      the records; `view.py` shows them
"""
