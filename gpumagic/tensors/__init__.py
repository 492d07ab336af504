"""`%devices`: the live tensors and what holds them.

Start with `scan.scan`, which makes the report from the heap.

    scan.py         finds the tensors, names them, compares each device's sum with its allocator
    rows.py         groups storages into blocks of memory and builds a row for each
    why.py          every holder of one tensor, for `--why`
    release.py      frees what only outputs and the last error keep, for `--release-held`
    report.py       what `%devices`, `--diff` and `--held` return; `view.py` and `diff_view.py` show it
    held_report.py  what `--why` and `--release-held` return; `held_view.py` shows it, and `--held`
"""
