"""`%gpuinfo`: the GPUs, who uses them, or why there is none.

Start with `probe.read_gpus`, which joins what the other files read into a `report.GPUReport`; `view` shows it.

- `nvml`, `cards`, `processes`: the connection to NVIDIA's driver, and what it reports of cards and processes
- `torch_build`, `torch_names`: the installed torch, and its names for the cards
- `other_devices`: devices that NVML does not know: simulated, XPU, MPS, unified memory
- `no_gpu`: why torch can use no GPU, with the remedy
- `device_names`: resolves names as users write them, such as ``gpu:1`` or ``auto``
- `live`: `-w`, the GPUs over time; `each_cell`: `--each-cell`, a line after every cell
- `bench`: `--bench`, how fast each device is
- `report`: the records of all of these; `view`, `history_view`, `bench_view`: their views
"""
