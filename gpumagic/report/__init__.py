"""What all reports share: the base class, the document model, and its forms as text, HTML and plots.

Start with `base.Report`. Views turn a report into a `document.Document`; renderers turn that into text.

    base.py        `Report`: rows, `to_pandas`, `to_dict`, and how it shows itself
    document.py    the blocks that a document consists of
    rendering.py   report -> document -> text or HTML
    text.py        documents as plain text
    html.py        documents as HTML
    plot.py        reports as matplotlib figures
    units.py       bytes, times and counts as text
    progress.py    a progress bar, on stderr
    origin.py      the host, process and rank that a report comes from
"""
