"""Counts with their nouns, for messages and descriptions: "1 graph", "2 graphs"."""

_PLURALS = {"vertex": "vertices", "inner vertex": "inner vertices", "leaf": "leaves", "child": "children"}


def counted(number: int | str, noun: str) -> str:
    """Returns a number, or its text, and the noun in the singular or the plural."""
    if str(number).strip() != "1":
        noun = _PLURALS.get(noun) or noun + ("es" if noun[-2:] in ("ch", "ss") else "s")
    return f"{number} {noun}"
