"""Equations that call a jaxpr, whatever JAX names its parameter."""

from typing import Any

CALLS = ("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call")


def opened(jaxpr: Any) -> tuple[Any, Any]:
    """A jaxpr, closed or not, and its constants."""
    return getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())


def body_of(eqn: Any) -> tuple[Any, Any]:
    """The jaxpr that an equation calls, one of `CALLS` or a `checkpoint`, and its constants."""
    return opened(eqn.params.get("jaxpr", eqn.params.get("call_jaxpr")))
