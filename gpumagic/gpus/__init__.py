"""`%gpuinfo`: the GPUs, who uses them, or why there is none.

Start with `probe.read_gpus`, which joins what the other files read into a `report.GPUReport`.

    nvml.py           the connection to NVIDIA's driver; `cards.py` and `processes.py` are what it reports
    torch_build.py    the installed torch; `torch_names.py` has its names for the cards
    other_devices.py  devices that NVML does not know: simulated, XPU, MPS, unified memory
    no_gpu.py         why torch can use no GPU, with the remedy
    live.py           `-w`: the GPUs over time
    each_cell.py      `--each-cell`: a line after every cell
    report.py         the records of all of these; `view.py` and `history_view.py` show them
"""
