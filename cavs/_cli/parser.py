"""An argument parser whose errors suggest what the user may have meant."""

import argparse
import re
from typing import NoReturn

from cavs._graphs.suggest import suggestion


class Parser(argparse.ArgumentParser):
    """An `argparse.ArgumentParser` that suggests options and commands for misspelled ones."""

    def error(self, message: str) -> NoReturn:
        """Prints the usage, the message, and a suggestion, and exits with code 2."""
        wrong = (
            re.findall(r"--[\w-]+", message) if message.startswith("unrecognized") else re.findall(r"choice: '(\S+)'", message)
        )
        known = [name for action in self._actions for name in (*action.option_strings, *(action.choices or ()))]
        hints = [suggestion(name, map(str, known)) for name in wrong]
        super().error(" ".join([f"{message}.", *filter(None, hints)]))


def parse(parser: Parser, arguments: list[str]) -> dict[str, object]:
    """Parses a command line. An unknown option is reported by the command that it was given to, which knows similar ones."""
    given, more = parser.parse_known_args(arguments)
    values = vars(given)
    if more:
        choices = next(action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction))
        part = choices.get(values["command"] or "", parser)
        part.error(f"unrecognized arguments: {' '.join(more)}")
    return values
