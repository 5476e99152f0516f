"""Marks of launches in a jaxpr: what each of them runs, for those who choose its layout by measuring (`_run.tune_traced`)."""

import dataclasses

import jax

from cavs._engines.engine import Job
from cavs._engines.persistent.lower import Recurrence
from cavs._jaxpr.jaxprs import Eqn
from cavs._jaxpr.ruled import Rules, call, pushed, ruled_p


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class LaunchMark(Rules):
    """The rules of an identity that says which launch computed its operand."""

    job: Job  # what the launch is a part of
    made: Recurrence  # the direction that it runs


def marked(flag: jax.Array, job: Job, made: Recurrence) -> jax.Array:
    """Returns the flag of a launch, marked in the jaxpr."""

    def same(x: jax.Array) -> list[jax.Array]:
        return [x]

    rules = LaunchMark(
        same,
        lambda primals, tangents: pushed(same, primals, tangents),
        lambda over, dims, operands: over(same, tuple(dims))(*operands),
        job=job,
        made=made,
    )
    return call(rules, flag)[0]


def is_mark(eqn: Eqn) -> bool:
    """Returns whether an equation is the mark of a launch."""
    return eqn.primitive is ruled_p and isinstance(eqn.params["rules"], LaunchMark)
