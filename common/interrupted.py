"""Ctrl-C ends a Python program with one line and exit code 130, wherever it is.

A program imports this first of all when it is run, because to import PyTorch takes seconds, and a Ctrl-C then would print a page of traceback.
"""

from __future__ import annotations

import os
import signal
import sys


def leave(number: int, _: object) -> None:
    """Ends the program at once. That is for moments in which it has nothing to tidy up."""
    program = os.path.splitext(os.path.basename(sys.argv[0]))[0]
    os.write(2, f"{program}: interrupted\n".encode())
    os._exit(128 + number)


def interrupt(number: int, _: object) -> None:
    """Raises KeyboardInterrupt, on whose way out temporary files are removed. The second signal doesn't wait for that."""
    signal.signal(number, leave)
    raise KeyboardInterrupt(number)


def take(handler: object, *numbers: int) -> None:
    """Makes this the handler of these signals. One that is ignored, as in the background of a script, stays ignored."""
    for number in numbers:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


def exit_code(error: KeyboardInterrupt) -> int:
    """As a shell has it for a program that a signal has ended."""
    return 128 + (error.args[0] if error.args else signal.SIGINT)
