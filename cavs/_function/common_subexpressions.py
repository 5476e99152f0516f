"""Merges common subexpressions: what F writes twice is computed once, and is one value.

Otherwise two phases of a kernel, for instance, might round it differently: if F writes x twice, `x == x.max()` could be false
everywhere. XLA merges such equations within one program, but the parts of F are programs of their own.
"""

from collections.abc import Sequence
from typing import Any

from cavs._function.user_rules import may_sum_first
from cavs._jaxpr.equal_jaxprs import literal_key, same_parameters
from cavs._jaxpr.equations import Program
from cavs._jaxpr.jaxprs import Atom, Eqn, is_var


def merge_common_subexpressions(program: Program) -> Program:
    """Returns the program without equations that are equal to an earlier one. F has no side effects (`_function.misuse`).

    Calls with a rule of the user that is not linear stay: the rule acts on the cotangent of each.
    """
    known: dict[Any, list[Eqn]] = {}

    def earlier(e: Eqn) -> Sequence[Atom] | None:
        key = (e.primitive, *(x if is_var(x) else literal_key(x) for x in e.invars))
        alike = known.setdefault(key, [])
        first = next((f for f in alike if same_parameters(e, f)), None)
        if first is not None and may_sum_first(e):
            return first.outvars
        alike.append(e)
        return None

    return program.without(earlier)
