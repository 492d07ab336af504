"""Ctrl-C while a report is made is the main thread's alone."""

from __future__ import annotations

import signal
import threading

from gpumagic.notebook import interrupts


def test_what_the_main_thread_holds_back_ends_nothing_in_another() -> None:
    ended: list[str] = []

    def work() -> None:
        try:
            with interrupts.ending():
                ended.append("by itself")
        except KeyboardInterrupt:
            ended.append("by Ctrl-C")

    with interrupts.held():
        signal.raise_signal(signal.SIGINT)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert ended == ["by itself"]


def test_what_may_be_ended_in_another_thread_lets_no_interrupt_into_the_main_ones_report() -> None:
    may_end, is_over = threading.Event(), threading.Event()

    def work() -> None:
        with interrupts.ending():
            may_end.set()
            is_over.wait(10)

    with interrupts.held():
        thread = threading.Thread(target=work)
        thread.start()
        may_end.wait(10)
        signal.raise_signal(signal.SIGINT)
        is_over.set()
        thread.join()
