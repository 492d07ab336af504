"""`%gpuinfo`: the GPUs, who uses them, or why there is none.

Start with `report.GpuRow`, which declares every figure, and `probe.read_gpus`, which joins what the others read.

    report.py         the rows with their figures, and the report; `view.py` shows it
    nvml.py           the connection to NVIDIA's driver, and its refusals in words
    cards.py          what it says of each card, and who uses them
    torch_devices.py  the installed torch, and the devices that only torch knows
    visibility.py     torch's names for the cards, or why it can use none, with the remedy
    live.py           `-w` and `--each-cell`: the GPUs over time, and a line after every cell
"""
