import os

import gpumagic
import torch
from torchtitan_cell import LLAMA_8B, QWEN_32B, training

os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"  # as torchtitan's run_train.sh
code = training(
    {"Llama-3.1-8B": LLAMA_8B, "Qwen3-32B": QWEN_32B}[model],
    batch,
    length,
    tensor_parallel=tensor_parallel,
    is_selective=checkpointing == "selective",
    optimizer=optimizer,
    steps=steps,
)
report = gpumagic.dry_run(code, {}, gpu="H100", capacity="95GiB", ranks=ranks, time_limit=500)
assert report.fits, report.verdict
figures["reserved"] = max(each.reserved for each in report.ranks)
