"""Suggestions for misspelled names in messages. The command line needs them before it imports anything large."""

import difflib
from collections.abc import Iterable


def suggestion(name: str, known: Iterable[str]) -> str:
    """`Did you mean ...?` for the most similar known name, or an empty string."""
    close = difflib.get_close_matches(name, [*known], 1, 0.6)
    return f"Did you mean {close[0]}?" if close else ""
