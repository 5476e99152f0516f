"""The type of pytrees."""

from typing import Any, TypeAlias

# Nested containers (dicts, lists, tuples, registered dataclasses, ...) with arrays as leaves. Python's type system cannot
# describe them.
PyTree: TypeAlias = Any
