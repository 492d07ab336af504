"""What all reports share: the base class, the document model, and its forms as text and HTML.

Start with `base.Report`. Views turn a report into a `document.Document`; renderers turn that into text.

    base.py        `Report`: rows, `to_pandas`, `to_dict`, how it shows itself, and the process that it is about
    document.py    the blocks that a document consists of, and tables by declared columns
    text.py        documents as plain text
    html.py        documents as HTML
    units.py       bytes, times and counts as text
    progress.py    one line that is rewritten while something takes long
"""
