"""The types that a type checker sees are those of the values."""

from tests import typed


def test_the_typed_program_runs() -> None:
    typed.program()
