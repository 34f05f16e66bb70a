"""Requests through a KV memory without a model: who is batched, and what the memory holds.

The simulator is one compiled loop over events (a request leaves, a request is admitted, all
advance). How requests get memory is a policy of admission.py, which calls the functions that the
engine calls.

Rules. First come, first served: a request that does not fit holds up those behind it. Every
running request gains one token a step. Step t of a request holds its prompt and t output tokens.
When pages run out, the youngest request is put back at the head of the queue and keeps its
tokens' count (they are computed again). Between two events nothing can change hands, so the loop
jumps there at once; the sums over the steps that it skips are exact.
"""

import dataclasses
from typing import Any, NamedTuple

import common
import jax
import jax.numpy as jnp
import numpy as np
from admission import Policy, paged

from paxattn import memory

__all__ = ["Events", "Policy", "Result", "paged", "run"]

CHUNK = 8192  # events in one call of the compiled loop
_NEVER = np.int32(2**31 - 1)


class Events(NamedTuple):
    """One line an event, all ``[E]`` int32 in the compiled loop; sums are over its steps."""

    steps: Any  # steps that passed
    running: Any  # requests running in them
    used: Any  # sum of tokens held
    final: Any  # sum of the tokens that the running requests will hold
    owned: Any  # sum of the slots that the requests own
    waiting: Any  # 1 if a request had arrived and found no place
    left: Any  # requests that finished
    admitted: Any  # requests that started
    preempted: Any  # requests that were put back
    waste: Any  # the largest part of its memory that one request leaves empty, slots (paged)


class _State(NamedTuple):
    store: Any
    request: jax.Array  # [B] int32, -1 for an idle row
    length: jax.Array  # [B] int32
    final: jax.Array  # [B] int32
    owned: jax.Array  # [B] int32
    upcoming: jax.Array  # [] int32: the next request that has never run
    put_back: jax.Array  # [B] int32: preempted requests, a stack: the oldest is on top
    put_back_length: jax.Array  # [B] int32
    num_put_back: jax.Array  # [] int32
    now: jax.Array  # [] int32, steps
    blocked: jax.Array  # [] bool: the head of the queue did not fit, and nothing has left since


@dataclasses.dataclass(frozen=True)
class Result:
    """What a run gives: each event, and the totals."""

    policy: str
    capacity: int
    page_size: int
    events: Events  # NumPy, int64

    def window(self, waiting: bool) -> np.ndarray:
        """Events to average over: all, or those at which a request waited for memory."""
        passed = self.events.steps > 0
        return passed & (self.events.waiting > 0) if waiting else passed

    def mean_running(self, waiting: bool = False, until: int | None = None) -> float:
        """Requests running, averaged over steps.

        Args:
          waiting: only over the steps at which a request waited for memory.
          until: only over the steps before this one, without the first fifth of them, in which
            the memory fills.
        """
        chosen = self.window(waiting)
        if until is not None:
            now = np.cumsum(self.events.steps)
            chosen = chosen & (now > until // 5) & (now <= until)
        steps = self.events.steps[chosen]
        return float((self.events.running[chosen] * steps).sum() / max(steps.sum(), 1))

    def slots(self, waiting: bool = False) -> dict[str, float]:
        """Slot-steps: used, reserved, internal, external, free; they sum to capacity * steps."""
        chosen = self.window(waiting)
        used, final, owned, steps = (
            int(part[chosen].sum())
            for part in (self.events.used, self.events.final, self.events.owned, self.events.steps)
        )
        total = self.capacity * steps
        if self.page_size:
            return {
                "used": used,
                "reserved": 0,
                "internal": owned - used,
                "external": 0,
                "free": total - owned,
            }
        # while a request waits nothing outside the regions can be given to it
        rest = total - owned
        return {
            "used": used,
            "reserved": final - used,
            "internal": owned - final,
            "external": rest if waiting else 0,
            "free": 0 if waiting else rest,
        }

    def percent(self, waiting: bool = False) -> dict[str, float]:
        """Used, reserved, internal, external in percent of what is held; they sum to 100."""
        parts = self.slots(waiting)
        parts.pop("free")
        held = max(sum(parts.values()), 1)
        return {name: 100 * value / held for name, value in parts.items()}


def run(
    policy: Policy,
    prompt: np.ndarray,
    output: np.ndarray,
    arrival: np.ndarray | None = None,
    label: str | None = None,
) -> Result:
    """Run every request to its end.

    Args:
      policy: from admission.py.
      prompt: ``[R]`` tokens, at least 1.
      output: ``[R]`` tokens; a request with 0 is admitted and leaves without a step.
      arrival: ``[R]`` steps, not decreasing; None when all are there from the start.
      label: of the progress bar, by default the policy's name.

    Raises:
      ValueError: for an empty trace, a prompt without tokens, or a request that cannot fit even
        when it is alone.
    """
    prompt, output = np.asarray(prompt), np.asarray(output)
    if len(prompt) == 0:
        raise ValueError("the trace has no requests")
    if prompt.min() < 1 or output.min() < 0:
        bad = int(np.flatnonzero((prompt < 1) | (output < 0))[0])
        raise ValueError(f"request {bad} has {prompt[bad]} prompt and {output[bad]} output tokens")
    total = prompt.astype(np.int64) + output
    if total.max() > policy.capacity:
        bad = int(total.argmax())
        raise ValueError(
            f"request {bad} needs {total[bad]:,} token slots, more than the whole memory's "
            f"{policy.capacity:,}: leave it out or enlarge the memory"
        )
    if arrival is None:
        arrival = np.zeros(len(prompt), np.int32)
    trace = tuple(jnp.asarray(x, jnp.int32) for x in (prompt, total, arrival))
    state = jax.jit(lambda: _start(policy))()  # a buffer of its own for each array
    pieces, done = [], 0
    with common.bar(len(prompt), label or policy.name, "req") as bar:
        while done < len(prompt):
            state, events = _compiled(policy, state, trace)
            events = jax.tree.map(np.asarray, events)
            pieces.append(events)
            gone = int(events.left.sum())
            if not (gone or events.admitted.any() or events.steps.any()):
                raise RuntimeError(f"{policy.name}: no progress after {done} requests")
            done += gone
            bar.update(gone)
    joined = (np.concatenate(part).astype(np.int64) for part in zip(*pieces, strict=True))
    return Result(policy.name, policy.capacity, policy.page_size, Events(*joined))


def _start(policy: Policy) -> _State:
    def zeros() -> jax.Array:
        return jnp.zeros(policy.rows, jnp.int32)

    zero = jnp.int32(0)
    return _State(
        policy.init(),
        *(zeros() - 1, zeros(), zeros(), zeros()),
        *(zero, zeros(), zeros(), zero, zero, jnp.array(False)),
    )


def _chunk(policy: Policy, state: _State, trace: tuple[jax.Array, ...]):
    def one(state, _):
        state, events = _event(policy, state, trace)
        return state, jnp.stack(events)  # one write instead of ten

    state, lines = jax.lax.scan(one, state, None, length=CHUNK)
    return state, Events(*lines.T)


_compiled = jax.jit(_chunk, static_argnums=0, donate_argnums=1)


def _event(policy: Policy, state: _State, trace: tuple[jax.Array, ...]):
    """A departure, or an admission, or the way to the next of them."""
    prompt, total, arrival = trace
    count = prompt.shape[0]
    top = jnp.maximum(state.num_put_back - 1, 0)
    again = state.num_put_back > 0
    head = jnp.where(again, state.put_back[top], jnp.minimum(state.upcoming, count - 1))
    length = jnp.where(again, state.put_back_length[top], prompt[head])
    exists = again | (state.upcoming < count)
    here = exists & (arrival[head] <= state.now)
    next_arrival = jnp.where(exists & ~here, arrival[head], _NEVER)

    leaves = jnp.any(_finished(state))
    starts = here & ~state.blocked & jnp.any(state.request < 0)
    starts &= policy.may_fit(state.store, length)
    stuck = _stuck(policy, state) if policy.page_size else jnp.array(False)
    kind = jnp.where(leaves, 0, jnp.where(starts, 1, jnp.where(stuck, 0, 2)))
    advance = _advance_paged if policy.page_size else _advance_owned
    return jax.lax.switch(
        kind,
        [
            lambda s: _leave(policy, s),
            lambda s: _admit(policy, s, head, length, total[head], again),
            lambda s: advance(policy, s, _steps(policy, s, next_arrival), here),
        ],
        state,
    )


def _finished(state: _State) -> jax.Array:
    return (state.request >= 0) & (state.length >= state.final)


def _stuck(policy: Policy, state: _State) -> jax.Array:
    """``[]`` bool: the free pages are fewer than the next step takes."""
    starting = (state.request >= 0) & (state.length % policy.page_size == 0)
    return jnp.sum(starting, dtype=jnp.int32) > memory.free_pages(state.store)


def _no_events() -> Events:
    return Events(*[jnp.int32(0)] * len(Events._fields))


def _leave(policy: Policy, state: _State) -> tuple[_State, Events]:
    """Let one finished request go, or put back the youngest when pages ran out."""
    finished = _finished(state)
    done = jnp.any(finished)
    youngest = jnp.argmax(state.request)  # the youngest has the largest number
    row = jnp.where(done, jnp.argmax(finished), youngest).astype(jnp.int32)
    at = jnp.where(done, policy.rows, state.num_put_back)  # policy.rows: dropped
    state = state._replace(
        store=policy.leave(state.store, row),
        put_back=state.put_back.at[at].set(state.request[row], mode="drop"),
        put_back_length=state.put_back_length.at[at].set(state.length[row], mode="drop"),
        num_put_back=state.num_put_back + (~done).astype(jnp.int32),
        request=state.request.at[row].set(-1),
        length=state.length.at[row].set(0),
        final=state.final.at[row].set(0),
        owned=state.owned.at[row].set(0),
        blocked=~done,  # only a departure makes room for the one who was put back
    )
    left = done.astype(jnp.int32)
    return state, _no_events()._replace(left=left, preempted=1 - left)


def _admit(
    policy: Policy,
    state: _State,
    head: jax.Array,
    length: jax.Array,
    final: jax.Array,
    again: jax.Array,
) -> tuple[_State, Events]:
    """Start the head of the queue, if it fits."""
    row = jnp.argmax(state.request < 0).astype(jnp.int32)
    store, owned, ok = policy.admit(state.store, row, length, final)
    row = jnp.where(ok, row, policy.rows)  # policy.rows: dropped
    state = state._replace(
        store=store,
        request=state.request.at[row].set(head, mode="drop"),
        length=state.length.at[row].set(length, mode="drop"),
        final=state.final.at[row].set(final, mode="drop"),
        owned=state.owned.at[row].set(owned, mode="drop"),
        upcoming=state.upcoming + (ok & ~again).astype(jnp.int32),
        num_put_back=state.num_put_back - (ok & again).astype(jnp.int32),
        blocked=~ok,
    )
    return state, _no_events()._replace(admitted=ok.astype(jnp.int32))


def _steps(policy: Policy, state: _State, next_arrival: jax.Array) -> jax.Array:
    """Steps until something can change hands."""
    running = state.request >= 0
    remaining = jnp.min(jnp.where(running, state.final - state.length, _NEVER))
    arrives = jnp.where(next_arrival == _NEVER, _NEVER, next_arrival - state.now)
    until = jnp.minimum(remaining, arrives)
    until = jnp.where(until == _NEVER, 0, until)  # nobody runs and nobody comes
    # the sums over the steps must fit in 32 bits
    return jnp.minimum(until, max(1, 2**30 // policy.capacity))


def _sums(state: _State, steps: jax.Array, waits: jax.Array) -> Events:
    """The sums over the next steps that every policy has."""
    count = jnp.sum(state.request >= 0, dtype=jnp.int32)
    tokens = jnp.sum(state.length, dtype=jnp.int32)
    return _no_events()._replace(
        steps=steps,
        running=count,
        used=tokens * steps + count * (steps * (steps + 1) // 2),
        final=jnp.sum(state.final, dtype=jnp.int32) * steps,
        owned=jnp.sum(state.owned, dtype=jnp.int32) * steps,
        waiting=waits.astype(jnp.int32),
    )


def _advance_owned(
    policy: Policy, state: _State, steps: jax.Array, waits: jax.Array
) -> tuple[_State, Events]:
    del policy
    length = state.length + jnp.where(state.request >= 0, steps, 0)
    return state._replace(length=length, now=state.now + steps), _sums(state, steps, waits)


def _advance_paged(
    policy: Policy, state: _State, steps: jax.Array, waits: jax.Array
) -> tuple[_State, Events]:
    """As far as the free pages reach, and at most a page's length when anyone runs."""
    size = policy.page_size
    running = state.request >= 0
    ahead = jnp.arange(1, size + 1, dtype=jnp.int32)[:, None]  # [P, 1]
    pages = (state.length[None, :] + ahead + size - 1) // size  # [P, B] after so many steps
    pages = jnp.sum(jnp.where(running[None, :], pages, 0), axis=1, dtype=jnp.int32)
    have = jnp.sum((state.length + size - 1) // size, dtype=jnp.int32)
    # the need only grows with the steps, so the steps that can be paid for come first
    reach = jnp.sum(pages - have <= memory.free_pages(state.store), dtype=jnp.int32)
    reach = jnp.where(jnp.any(running), jnp.minimum(reach, steps), steps)

    store, _ = memory.reserve(state.store, state.length + jnp.where(running, reach, 0), 1)
    spare = jnp.where(running, memory.held_pages(store) * size - store.lengths, 0)
    inside = ahead[:, 0] <= reach
    events = _sums(state, reach, waits)._replace(
        owned=jnp.sum(jnp.where(inside, pages, 0), dtype=jnp.int32) * size,
        waste=jnp.max(spare),  # from the tables, not from the formula
    )
    # the memory's own lengths: a row that was refused would fall behind and never end
    state = state._replace(store=store, length=store.lengths, now=state.now + reach)
    return state, events
