"""Equations that call a jaxpr, whatever JAX names its parameter."""

from typing import Any

CALLS = ("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call", "custom_vmap_call")


def opened(jaxpr: Any) -> tuple[Any, Any]:
    """A jaxpr, closed or not, and its constants."""
    return getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())


def body_of(eqn: Any) -> tuple[Any, Any]:
    """The jaxpr that an equation calls, one of `CALLS` or a `checkpoint`, and its constants."""
    return opened(next(eqn.params[name] for name in ("jaxpr", "call_jaxpr", "call") if name in eqn.params))


def scan_parts(params: dict[str, Any], operands: list[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """A scan's constants, initial carry and xs."""
    if "ft_in" in params:  # jax 0.11
        consts, init, xs = (list(part) for part in params["ft_in"].update(operands).unpack())
        return consts, init, xs
    first, last = params["num_consts"], params["num_consts"] + params["num_carry"]
    return operands[:first], operands[first:last], operands[last:]
