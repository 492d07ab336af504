"""The code of a cell: its text, its syntax tree, and the line that runs.

Start with `text`, which parses a cell and makes edits to it, and `frames`, which decides whose code a frame runs.

    text.py        a cell's text with its syntax tree, and edits that keep every other character
    cell_code.py   facts in a cell's text: the names it uses, numbers under a name, batch sizes
    bindings.py    which variables a cell binds before it reads them, whichever way it goes
    loop_code.py   what repeats in some code, and what it makes only to move it
    settings.py    the int that a cell's memory goes with, and the cell with another value of it
    frames.py      frames and exceptions: whose code they run, their variables, and the line of a cell that runs
"""
