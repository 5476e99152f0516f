"""States that the gradients of weights read in 16 bits, as the forward's products did.

The launch of the forward keeps copies of 16 bits of what its products read (`kernels._program.halves`). If the backward reads a
state for nothing but products x^T dY, which round x to as many bits anyway, the copy is all that must stay.
"""

from cavs._engines.persistent.lower import Recurrence
from cavs._function.domains import STATIC, domain_of
from cavs._function.evaluate import matrix_product
from cavs._function.keeping import lazy_reads
from cavs._jaxpr.jaxprs import Atom, is_var
from cavs.kernels import Tensor, TensorRole

_UNCHANGED = ("add", "add_any", "concatenate", "stack", "reshape")  # of a sum of rows, products round each term


def halved_states(forward: Recurrence, backward: Recurrence) -> list[int]:
    """Returns the states of which lazy gradients read the copy of 16 bits that `forward` writes.

    Args:
        forward: The forward of the kind that has children.
        backward: Its backward.
    """
    part, program = forward.part, forward.program
    of = dict(zip(part.forward.slots, (i for _, i in part.recurrent.slots), strict=True))
    of |= dict(zip(part.forward.child, part.recurrent.child, strict=True))
    copied = {i for i in of.values() if Tensor(TensorRole.STATE, i, half=True) in program.halves}
    later = lazy_reads(part.joint)
    read = {i for i in copied if any(v in later for v, j in of.items() if i == j)}
    exact = {i for i in read if Tensor(TensorRole.STATE, i) in backward.program.tensors()}
    exact |= {i for i, v in enumerate(part.forward.states) if is_var(v) and v in later}
    makers = {v: e for e in part.joint.program.eqns for v in e.outvars}

    def states(x: Atom, product: bool) -> None:
        """Adds to `exact` the states that `x` reads, except in sums that a product reads."""
        if not is_var(x):
            return
        if x in of:
            exact.update(() if product else {of[x]})
        elif x in makers and x not in part.joint.available:
            eqn = makers[x]
            for y in eqn.invars:
                states(y, product and eqn.primitive.name in _UNCHANGED)

    for use in part.reverse.uses:
        axes = [STATIC if domain_of(x, part.role.domain) == STATIC else use.domain for x in use.eqn.invars]
        for x in use.operands.values():
            states(x, matrix_product(use.eqn, axes) is not None)
    return sorted(read - exact)
