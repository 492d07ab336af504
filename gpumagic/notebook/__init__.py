"""How a cell runs under a guard, and when the guard's report is shown.

Start with `cells.CellSessions`. It knows nothing of devices and memory: those are the guards' business.

    guards.py      the protocol of a guard; the body of a cell magic as code, and what runs it under guards
    cells.py       `%%magic` -> `%magic`, so that IPython runs the cell as its own, and the guards of running cells
    completion.py  completion of the magics' options, devices and variables
    session.py     the running IPython shell and its variables
"""
