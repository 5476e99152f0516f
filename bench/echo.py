"""Memory and time of training steps with and without `cavs.memory.recompute`: `python -m bench memory`.

Each measurement runs in a process of its own, because an allocator's peak cannot be reset. A step is the loss, its gradient
and a plain SGD update whose parameters are donated.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
VARIANTS = ("jax.grad", "jax.checkpoint", "recompute", "recompute half", "recompute min")


def measure(
    case: str, size: str = "full", variants: tuple[str, ...] = VARIANTS, device: str = "gpu", steps: int = 20
) -> list[Any]:
    """Measures a case of `bench.echo_cases`, each variant in a fresh process; prints and returns one JSON object each.

    The variants: "jax.grad"; "jax.checkpoint" as an expert places it; "recompute", without a budget; "recompute half", half
    of what that is predicted to need, or the floor; and "recompute min".

    Returns:
        Dictionaries: bytes of arguments, results and temporary memory as the compiler says ("temp", and "total" less what is
        donated), the allocator's peak ("peak", on a GPU), "predicted" temporary bytes and FLOPs run twice ("flops") if there
        is a plan, seconds to plan and to compile, and "ms", the median of `steps` steps.
    """
    found = []
    for variant in variants:
        environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONPATH": str(ROOT)}
        if device == "cpu":
            environment["JAX_PLATFORMS"] = "cpu"
        command = [sys.executable, "-m", "bench.echo", case, size, variant, str(steps)]
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=1800)
        said = done.stdout.splitlines()[-1:] if done.returncode == 0 else []
        found.append(json.loads(said[0]) if said else {"case": case, "variant": variant, "error": done.stderr[-500:]})
        print(json.dumps(found[-1]), flush=True)
    return found


def _one(case: str, size: str, variant: str, steps: int) -> dict[str, Any]:
    import jax

    from bench.echo_cases import CASES, identity
    from cavs.memory import recompute

    found = CASES[case]
    params, batch = jax.jit(lambda key: found.init(key, **getattr(found, size)))(jax.random.key(0))
    result: dict[str, Any] = {"case": case, "size": size, "variant": variant, "device": jax.devices()[0].device_kind}

    def loss(params: Any, batch: Any) -> jax.Array:
        return found.loss(params, batch, jax.checkpoint if variant == "jax.checkpoint" else identity)

    if variant.startswith("recompute"):
        start, budget = time.perf_counter(), variant.removeprefix("recompute").strip() or None
        if budget == "half":
            plan = recompute(loss).plan(params, batch)
            budget = max(plan.peak // 2, plan.floor)
        loss = recompute(loss, budget)
        plan = loss.plan(params, batch)
        result |= {"predicted": plan.peak, "kept": plan.bytes, "flops": plan.flops, "plain": plan.plain_peak, "budget": budget}
        result["plan_s"] = round(time.perf_counter() - start, 2)

    def step(params: Any, batch: Any) -> tuple[Any, jax.Array]:
        value, grads = jax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 1e-3 * g, params, grads), value

    start = time.perf_counter()
    compiled = jax.jit(step, donate_argnums=0).lower(params, batch).compile()
    result["compile_s"] = round(time.perf_counter() - start, 2)
    m = compiled.memory_analysis()
    assert m is not None
    result["temp"] = m.temp_size_in_bytes
    result["total"] = m.argument_size_in_bytes + m.output_size_in_bytes + m.temp_size_in_bytes - m.alias_size_in_bytes
    times = []
    for _ in range(steps + 3):
        start = time.perf_counter()
        params, value = compiled(params, batch)
        jax.block_until_ready(value)
        times.append(time.perf_counter() - start)
    result |= {"ms": round(sorted(times[3:])[steps // 2] * 1e3, 3), "loss": float(value)}
    result["peak"] = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return result


if __name__ == "__main__":
    print(json.dumps(_one(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))))
