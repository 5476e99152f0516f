"""Words for messages: counts with their nouns, "1 graph", "2 graphs", and suggestions for misspelled names."""

import difflib
from collections.abc import Iterable

_PLURALS = {"vertex": "vertices", "inner vertex": "inner vertices", "leaf": "leaves", "child": "children"}


def counted(number: int | str, noun: str) -> str:
    """Returns a number, or its text, and the noun in the singular or the plural."""
    if str(number).strip() != "1":
        noun = _PLURALS.get(noun) or noun + ("es" if noun[-2:] in ("ch", "ss") else "s")
    return f"{number} {noun}"


def suggestion(name: str, known: Iterable[str]) -> str:
    """`Did you mean ...?` for the most similar known name, or an empty string."""
    close = difflib.get_close_matches(name, [*known], 1, 0.6)
    return f"Did you mean {close[0]}?" if close else ""
