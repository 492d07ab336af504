"""`%devices`: the live tensors and what holds them.

Start with `scan.scan`, which makes the report from the heap.

    scan.py            finds the tensors and names them
    rows.py            groups storages into blocks of memory and builds a row for each, with the line that frees it
    detaching.py       the line that makes tensors release their autograd graphs
    reconciliation.py  compares each device's sum with its allocator
    why.py             every holder of one tensor, for `--why`; `lookup.py` tells which tensor a text means
    free.py            releases what no variable reaches, for `--free`
    report.py          what `%devices` and its options return
    view.py            shows the live tensors; `leaks_view.py` shows what the options return
"""
