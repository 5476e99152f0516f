"""Memory and time of training steps with and without `cavs.memory.recompute`, for `bench.memory`.

A step is the loss, its gradient and a plain SGD update whose parameters are donated.
"""

import time
from collections.abc import Generator
from typing import Any

import jax

from bench.echo_cases import CASES, identity
from cavs.memory import recompute

VARIANTS = ("jax.grad", "jax.checkpoint", "recompute", "recompute hand", "recompute min")


def echo(case: str, size: str, variant: str, steps: int) -> Generator[None, None, dict[str, Any]]:
    """Measures one variant of a case of `bench.echo_cases`. An allocator's peak cannot be reset, so use a new process for each.

    The variants: "jax.grad"; "jax.checkpoint" as an expert places it; "recompute", without a budget; "recompute hand", whose
    budget is what "jax.checkpoint" needs, or the floor; and "recompute min".

    Yields once when the step is compiled, and has not run.

    Returns:
        A record: bytes of temporary memory as the compiler says ("temp", and "total" with arguments and results, less what is
        donated), the allocator's peak ("peak", on a GPU), CPU seconds to plan, seconds to compile, and "ms", the median of
        `steps` steps. If there is a plan, its "predicted" temporary bytes, those of the loss and its gradients alone as
        "compiled", and FLOPs run twice ("flops").
    """
    found = CASES[case]
    params, batch = jax.jit(lambda key: found.init(key, **getattr(found, size)))(jax.random.key(0))
    result: dict[str, Any] = {"case": case, "size": size, "variant": variant}

    def loss(params: Any, batch: Any) -> jax.Array:
        return found.loss(params, batch, jax.checkpoint if variant == "jax.checkpoint" else identity)

    def by_hand(params: Any, batch: Any) -> jax.Array:
        return found.loss(params, batch, jax.checkpoint)

    budget, options = None, {}
    if variant == "recompute hand":
        budget = max(_compiled(by_hand, params, batch)[1].temp_size_in_bytes, recompute(loss).plan(params, batch).floor)
    if variant.startswith("recompute"):
        start, budget = time.process_time(), budget or variant.removeprefix("recompute").strip() or None
        loss = recompute(loss, budget)
        plan = loss.plan(params, batch)
        result |= {"kept": plan.bytes, "flops": plan.flops, "budget": budget}
        result["plan_s"] = round(time.process_time() - start, 2)
        result["predicted"], result["compiled"], _ = loss.verify(params, batch)
        options = plan.compiler_options

    start = time.perf_counter()
    compiled, m = _compiled(loss, params, batch, options)
    result["compile_s"] = round(time.perf_counter() - start, 2)
    result["temp"] = m.temp_size_in_bytes
    result["total"] = m.argument_size_in_bytes + m.output_size_in_bytes + m.temp_size_in_bytes - m.alias_size_in_bytes
    yield
    times = []
    for _ in range(steps + 3):
        start = time.perf_counter()
        params, value = compiled(params, batch)
        jax.block_until_ready(value)
        times.append(time.perf_counter() - start)
    result |= {"ms": round(sorted(times[3:])[steps // 2] * 1e3, 3), "loss": float(value)}  # pyright: ignore[reportPossiblyUnbound]
    result["peak"] = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return result


def _compiled(loss: Any, params: Any, batch: Any, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
    """A step of training, and the memory that it needs."""

    def step(params: Any, batch: Any) -> tuple[Any, jax.Array]:
        value, grads = jax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 1e-3 * g, params, grads), value

    compiled = jax.jit(step, donate_argnums=0).lower(params, batch).compile(options)
    memory = compiled.memory_analysis()
    assert memory is not None
    return compiled, memory
