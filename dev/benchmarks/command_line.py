"""The command lines of quality.py, judge.py, speedrun.py, conditions.py and fp8_rivals.py. This module needs Python alone: --help needs no packages."""

from __future__ import annotations

import argparse
import difflib
import re
from typing import NoReturn

from common.program import UserError, printable


class Parser(argparse.ArgumentParser):
    """--help shows the description as it is, and a mistake is a UserError."""

    def __init__(self, description: str):
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        unknown = re.fullmatch("unrecognized arguments: (--[^ =]*).*", message, re.DOTALL)
        nearest = difflib.get_close_matches(unknown[1], self._option_string_actions, 1) if unknown else []
        message += "".join(f"; did you mean {flag}?" for flag in nearest)
        raise UserError(f"{printable(message)} (--help lists the flags)")
