"""How long programs take beside each other, and what the machine could do at best."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np


def take_turns(programs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, np.ndarray]:
    """[rounds, 2] seconds of every program: on the clock, and of CPU time in all threads."""
    import jax

    times: dict[str, list] = {name: [] for name in programs}
    for i in range(rounds + 1):
        for name, program in programs.items():
            cpu, clock = time.process_time(), time.perf_counter()
            jax.block_until_ready(program())
            if i:  # the first round warms up
                times[name].append((time.perf_counter() - clock, time.process_time() - cpu))
    return {name: np.array(t) for name, t in times.items()}


def machine(dtype) -> dict[str, float]:
    """What this machine reaches: bytes/s of reading memory, floating point operations/s."""
    import jax
    import jax.numpy as jnp

    from paxattn import compiler, huge_pages

    size = 2**29 // 4  # half a gigabyte, beyond the largest caches
    n = 2048

    def product(kind, options):
        contract = (((1,), (1,)), ((), ()))
        a = jnp.ones((n, n), kind)
        f = jax.jit(
            lambda a: jax.lax.dot_general(a, a, contract, preferred_element_type=jnp.float32),
            compiler_options=options,
        )
        return lambda: f(a)

    # The fastest of these: bfloat16 is not always faster than the float32 that could stand for it.
    dots = {
        "float32": product(jnp.float32, {}),
        "plain": product(dtype, {}),
        "as the engine's": product(dtype, compiler.products(True, dtype).options),
    }
    # XLA reduces on one thread, but updates in place on all: what it reads meanwhile is counted.
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    held = [huge_pages.backed(jnp.zeros(size, jnp.int32))]

    def update():
        held[0] = add(held[0])
        return held[0]

    times = take_turns({"update": update, **dots}, 7)
    best = {name: float(t[:, 0].min()) for name, t in times.items()}
    return {
        "bandwidth_bytes_per_s": 4 * size / best["update"],
        "peak_flops": 2 * n**3 / min(best[name] for name in dots),
    }


class InPlace:
    """A program whose donated pool comes back as its first result, ready for the next call.

    The pool is the only KVPool among the arguments.
    """

    def __init__(self, f, *arguments):
        from paxattn.kv_pool import KVPool

        self.held = list(arguments)
        self.at = next(i for i, x in enumerate(arguments) if isinstance(x, KVPool))
        self.program = f.lower(*arguments).compile()

    def __call__(self):
        self.held[self.at], rest = self.program(*self.held)
        return self.held[self.at], rest


def operations(program: str, scope: str) -> set[str]:
    """The operations of a compiled program that belong to a `jax.named_scope`.

    What is fused belongs where the fused kernel's result does.
    """
    entry = program.partition("\nENTRY ")[2]
    lines = [line for line in entry.splitlines() if f"/{scope}/" in line]
    return {re.sub(r"^\s*(ROOT )?%?", "", line).partition(" ")[0] for line in lines}


def traced(step: InPlace, scope: str, rounds: int) -> tuple[float | None, float | None]:
    """Milliseconds of one scope's operations in a step, and their share of the whole program.

    Medians of `rounds` traced steps; None where the trace does not name the operations.
    """
    import jax

    names = operations(step.program.as_text(), scope)
    own, whole = [], []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                began = time.perf_counter()
                jax.block_until_ready(step())
                whole.append(1e3 * (time.perf_counter() - began))
            (path,) = Path(folder).rglob("*.xplane.pb")
            planes = jax.profiler.ProfileData.from_file(str(path)).planes
            events = [e for plane in planes for line in plane.lines for e in line.events]
        own.append(1e-6 * sum(e.duration_ns for e in events if e.name in names))
    if not all(own):
        return None, None
    return float(np.median(own)), float(np.median(np.divide(own, whole)))
