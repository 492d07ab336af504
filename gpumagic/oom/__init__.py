"""`%%oomguard`: when a cell runs out of memory, release what the failure pins, say why, and show what would help.

Start with `guard.py`: `OomGuard` has the order of things after a failure.

    guard.py         the guard around a block or a cell
    watch.py         what the guarded code does outside of its process, and what CUDA's allocator refuses it
    recognition.py   an exception -> whether it is out-of-memory, and the numbers in its text
    failure.py       what is read before the release, while the frames are whole: what ran out
    stack.py         what these frames tell: the line, the operation, its tensors
    ownership.py     which names, models and optimizers own the memory of a device
    evidence.py      what is read after the release: who holds memory, and what of it the cell uses
    conclusion.py    the report made of all this, of the verdict and of the advice
    trainers.py      libraries' trainers, and the code that told them how to train
    rerun.py         running again: with what, and when to stop
    rollback.py      what of the notebook is restored before that; `contents.py` tells what else has changed
    shell.py         shows a traceback after its report; guards all cells of a shell
    report.py        the records; `view.py` shows them
"""
