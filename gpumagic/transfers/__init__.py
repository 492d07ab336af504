"""`%%ondevice`: run a cell on a device, and report what it created there and what it copied between devices.

Start with `run.DeviceRun`: it opens a recording, lets the block run, and builds the report. Torch's own device context,
`device_mode`, makes the device the default; kernels at torch's dispatcher, `operators`, count copies in the recorder's
log, whoever makes them.

    run.py               the block and its report
    recording.py         what a run puts in place, and takes away; calls of `synchronize`; tracebacks
    device_mode.py       the device context, and what it does with functions that create or ask for copies
    operators.py         the count of copies and of values read, at torch's dispatcher
    sites.py             the line that asks for a copy, and for which variable
    causes.py            what a copy is called: the function by which the line asks for it
    recorder.py          the state of a run, by thread
    log.py               counts by line
    advice.py            what to change about them
    device_errors.py     an error about devices, explained
    report.py            the records; `view.py` shows them
    move.py              `--move`
    tracing.py           `--trace`: time and memory by line; `lines.py` tells which lines run
"""
