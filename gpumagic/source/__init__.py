"""The code of a cell: its text, its syntax tree, and the line that runs.

Start with `text`, which parses a cell and makes edits to it, and `frames`, which decides whose code a frame runs.

    text.py        a cell's text with its syntax tree, and edits that keep every other character
    cell_code.py   facts in a cell's text: its loops, batch sizes and copies, and the number that its memory goes with
    frames.py      frames and exceptions: whose code they run, their variables, and the line of a cell that runs
"""
