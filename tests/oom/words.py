"""What a suggestion says against what its code does, each way.

`CODE_OF` has what the code must do where the title says so, `TITLE_OF` what the text must say where the code does so.
"""

from __future__ import annotations

import re

from gpumagic.advice.records import Advice

CODE_OF = {
    r"\bfused\b": r"fused\b.*True",
    r"one parameter at a time": r"foreach\b.*False",
    r"\bbfloat16\b": r"bfloat16|bf16",
    r"\bfloat32\b": r"float32",
    r"^Delete": r"\b(x?del)\b",
    r"^Detach": r"detach|\.data\b|no_grad",
    r"without an autograd graph$": r"no_grad|inference_mode",
    r"^Freeze": r"requires_grad",
    r"^Recompute": r"checkpoint",
    r"^Replace \w+ by (\w+)": r"(?i)\1",
    r"^Run the cell on the CPU": r"cpu",
    r"^Run the cell on (\w+:\d+)": r"\1",
    r"^(?:Lower|Raise) .*\bfrom \d+ to (\d+)": r"\b\1\b",
    r"accumulate \d+ passes": r"accumul|% \d+",
    r"^Take (\d+) at a time": r"\b\1\b",
    r"^Train on (\d+) parts": r"\b\1\b",
    r"^Shard": r"fully_shard",
    r"without worker processes": r"num_workers\s*=\s*0",
    r"^Expand": r"\.expand",
    r"in the host's memory|to the host\b|to the CPU": r"cpu|numpy",
}
TITLE_OF = {
    r"fused\b.*True": r"fused",
    r"\"foreach\"\] = False|foreach=False(?!.*fused=True)": r"at a time",
    r"no_grad|inference_mode": r"graph|gradient|[Ee]valuat|[Ll]ook",
    r"autocast\(|dtype=torch\.bfloat16": r"bfloat16",
    r"checkpoint_sequential|gradient_checkpointing|utils\.checkpoint": r"[Rr]ecompute|again in backward",
    r"save_on_cpu|\.cpu\(\)": r"CPU|host|bfloat16",
    r"num_workers = 0": r"worker",
    r"fully_shard": r"[Ss]hard",
}


def mismatches(advice: Advice) -> list[str]:
    """Return how a suggestion's words and its code differ."""
    written = [change.new for change in advice.changes]
    code = "\n".join(filter(None, [advice.edit, advice.first, *written]))
    if not code or not advice.title:  # a number to be found by hand, a larger GPU
        return []
    text = f"{advice.title}. {advice.evidence}. {advice.cost}"
    wrong = []
    for said, done in CODE_OF.items():
        match = re.search(said, advice.title)
        if match is None:
            continue
        for number, group in enumerate(match.groups(), 1):
            done = done.replace(f"\\{number}", re.escape(group))  # noqa: PLW2901
        if not re.search(done, code):
            wrong.append(f"{advice.title!r} does not {done!r}: {code}")
    added = "\n".join(filter(None, [advice.first, *written]))  # `edit` has lines as they were, too
    for done, said in TITLE_OF.items():
        if re.search(done, added) and not re.search(said, text):
            wrong.append(f"{text!r} says nothing of {done!r}: {added}")
    return wrong
