"""`%%ondevice`: run a cell on a device, and report what it created there and what it copied between devices.

Start with `run.DeviceRun`: it opens a recording, lets the block run, and builds the report. A call of a torch function
goes from a wrapper or the function mode to its handler in `calls.py`, which counts it in the recorder's log.

    run.py               the block and its report
    patches.py           torch's functions exchanged for wrappers while a cell runs, or the function mode, and why
    wrappers.py          what stands in the place of torch's functions
    function_holders.py  the search for everything that holds one of torch's functions
    device_mode.py       the function mode
    tracing.py           the dispatch mode of `--trace` and `--strict`
    calls.py             which functions create, move or read, and their handlers; `indexing.py` has those of indexing
    recorder.py          the state of a run, by thread
    log.py               counts by line, and advice
    explain.py           an error about devices, explained; `device_errors.py` knows the errors
    report.py            the records; `view.py` shows them
    move/                `--move`
"""
