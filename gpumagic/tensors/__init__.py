"""`%devices`: the live tensors and what holds them. Start with `scan.scan`, which makes the report from the heap.

scan         finds the tensors, names them, compares each device's sum with its allocator
rows         groups storages into blocks of memory and builds a row for each
why          every holder of one tensor, for `--why`
release      frees what only outputs and the last error keep, for `--release-held`
baseline     the report that `--diff` compares with
report       what `%devices`, `--diff` and `--held` return; `view` and `diff_view` show it
held_report  what `--why` and `--release-held` return; `held_view` shows it, and `--held`
"""
