"""`%%ondevice`: run a cell on a device, and report what it created there and what it copied between devices.

Start with `run.DeviceRun`: it opens a recording, lets the block run, and builds the report. A call of a torch function
goes from a wrapper or the function mode to its handler in `calls`, which counts it in the recorder's log.

`run`: the block and its report. `patches`: patches or function mode, and why. `wrappers`: what replaces functions.
`function_holders`: where functions are bound. `device_mode`: the function mode. `tracing`: the dispatch mode of
`--trace` and `--strict`. `calls`, `indexing`: the handlers. `recorder`: the state of a run, by thread. `log`: counts by
line, and advice. `move`: `--move`. `explain`, `device_errors`: what an error about devices means. `report`, `view`:
records, and how they are shown.
"""
