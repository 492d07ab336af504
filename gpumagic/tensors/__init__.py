"""`%devices`: the live tensors and what holds them.

Start with `scan.scan`, which makes the report from the heap.

    scan.py         finds the tensors and names them
    reconciliation.py  compares each device's sum with its allocator
    rows.py         groups storages into blocks of memory and builds a row for each, with the line that frees it
    why.py          every holder of one tensor, for `--why`; releases what no variable reaches, for `--free`
    report.py       what `%devices` and its options return; `view.py` shows it, `leaks_view.py` what the options return
"""
