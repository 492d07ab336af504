"""What would make a cell fit that ran out of memory: rules suggest changes, dry runs of the changed cell try them.

It runs in the notebook's process, called by `oom.evidence`; only the dry runs are in another.

    facts.py      the records of a failure that every rule reads, and who builds them
    rules/        facts -> verdict and suggestions
    search.py     the suggestions, tried and ranked; `sets.py` combines them where none fits alone
    suggestion.py one of them on its way through the search
    trials.py     what dry runs tell of them; `number_choice.py` finds the number with which one fits
    runs.py       the dry runs of the edited cell, while there is time
    records.py    the suggestions, and what the cell needs; `view.py` shows one suggestion
"""
