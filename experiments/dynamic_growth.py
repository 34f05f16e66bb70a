"""Memory over a request's life: on demand, reserved, or grown by copying.

One request reads its prompt and decodes token by token. The script follows the memory that it
keeps from everyone else at every step:

  paged          a page more whenever the last one is full: the engine's append, step by step
  reserve-max    room for the longest request, from the first token to the last
  grow-and-copy  exactly its length, in one piece; each token copies all of it to a new place
                 (caches that grow by jnp.concatenate), so old and new exist at once

JSON keys:
  tokens       tokens held after each step
  slots        {paged, reserve_max, grow_and_copy}: slots held at each step (grow-and-copy: both
               pieces during the step)
  slot_steps   {...}: their sums, the memory's price over the request's life
  copied_tokens  {...}: tokens moved in all
  bytes        {...}: the most bytes at any time, for --model
  config
"""

import common
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from paxattn import arena, contiguous, memory
from paxattn.geometry import KNOWN_MODELS, PageGeometry

NAMES = {
    "reserve_max": "longest reserved",
    "grow_and_copy": "grow and copy",
    "paged": "pages on demand",
}


def options(parser):
    parser.add_argument("--prompt", type=int, default=161, help="prompt tokens (default: 161)")
    parser.add_argument("--output", type=int, default=338, help="output tokens (default: 338)")
    parser.add_argument("--max-len", type=int, default=2048, help="longest request (default: 2048)")
    parser.add_argument("--page-size", type=int, default=16, help="tokens in a page (default: 16)")
    parser.add_argument("--model", default="llama-13b", choices=sorted(KNOWN_MODELS))


def follow_pages(prompt, output, longest, size):
    """Slots held, token by token, by the functions that the engine runs."""
    width = -(-longest // size)

    def step(state, _):
        state, _, ok = memory.append(state, jnp.ones(1, bool))
        return state, (memory.held_pages(state)[0] * size, state.lengths[0], ok[0])

    def life():
        state, ok = memory.reserve(
            memory.init(width + 1, 1, width, size), jnp.full(1, prompt, jnp.int32)
        )
        first = memory.held_pages(state)[0] * size
        state, (slots, lengths, more) = jax.lax.scan(step, state, None, length=output)
        end = memory.release(state, jnp.ones(1, bool))
        return first, slots, lengths, ok.all() & more.all(), memory.free_pages(end)

    first, slots, lengths, ok, free = jax.jit(life)()
    assert bool(ok)
    assert int(free) == width  # every page is back
    return np.append(first, slots), np.append(prompt, lengths)


def follow_reserved(prompt, output, longest, size):
    width = -(-longest // size)
    state = contiguous.init(width + 1, 1, width, size)
    state, _ = contiguous.reserve(state, jnp.full(1, prompt, jnp.int32))
    return np.full(output + 1, int(contiguous.held_pages(state)[0]) * size)


def follow_copies(prompt, output, longest):
    """Slots in use while a token is added: the old piece and the new one, and tokens copied."""

    def step(state, _):
        before = state.size[0]
        state, ok = arena.move(state, jnp.int32(0), before + 1)
        return state, (before + state.size[0], before, ok)

    def life():
        state, ok = arena.place(arena.init(4 * longest, 1), jnp.int32(0), jnp.int32(prompt))
        _, (slots, copied, more) = jax.lax.scan(step, state, None, length=output)
        return slots, jnp.sum(copied, dtype=jnp.int32), ok & more.all()

    slots, copied, ok = jax.jit(life)()
    assert bool(ok)
    return np.append(prompt, slots), int(copied)


def run(args):
    longest, size = args.max_len, args.page_size
    prompt, output = args.prompt, min(args.output, 64) if args.quick else args.output
    if prompt < 1 or output < 0 or prompt + output > longest:
        common.fail(f"{prompt} prompt and {output} output tokens do not fit in --max-len {longest}")
    geometry = PageGeometry.of(args.model, size)
    paged, tokens = follow_pages(prompt, output, longest, size)
    copies, copied = follow_copies(prompt, output, longest)
    slots = {
        "reserve_max": follow_reserved(prompt, output, longest, size),
        "grow_and_copy": copies,
        "paged": paged,
    }
    assert (paged - tokens < size).all()  # never a whole page too many
    sums = {name: int(values.sum()) for name, values in slots.items()}
    most = {name: int(v.max()) * geometry.bytes_per_token for name, v in slots.items()}
    moved = {"reserve_max": 0, "grow_and_copy": copied, "paged": 0}
    used = int(tokens.sum())
    common.report(
        common.table(
            ("memory", "most slots", "most MB", "tokens / slot-steps, %", "tokens copied"),
            [
                (NAMES[n], int(slots[n].max()), most[n] / 1e6, 100 * used / sums[n], moved[n])
                for n in slots
            ],
            f"A request of {prompt} + {output} tokens, {args.model}, {size} tokens a page",
        )
    )
    config = {
        "prompt": prompt,
        "output": output,
        "max_len": longest,
        "page_size": size,
        "model": args.model,
        "bytes_per_token": geometry.bytes_per_token,
        "seed": args.seed,
    }
    common.write_json(
        args,
        {
            "environment": common.environment(),
            "config": config,
            "tokens": tokens,
            "slots": slots,
            "slot_steps": {**sums, "tokens": used},
            "copied_tokens": moved,
            "bytes": most,
        },
    )
    draw(args, tokens, slots, used, sums, geometry)


def draw(args, tokens, slots, used, sums, geometry):
    common.style()
    figure, (whole, close) = plt.subplots(1, 2, figsize=(14, 6.2), width_ratios=(1.5, 1))
    steps = np.arange(len(tokens))
    colors = dict(zip(slots, ("#D55E00", "#E69F00", "#0072B2"), strict=True))
    dashes = dict(zip(slots, ("--", "-.", "-"), strict=True))
    for axis, part in ((whole, slice(None)), (close, slice(0, min(len(tokens), 65)))):
        for name, values in slots.items():
            if axis is close and name != "paged":
                continue
            share = 100 * used / sums[name]
            axis.step(
                *(steps[part], values[part]),
                where="post",
                color=colors[name],
                linestyle=dashes[name],
                label=f"{NAMES[name]} ({share:.0f}% used)",
            )
        axis.fill_between(steps[part], tokens[part], color="#56B4E9", alpha=0.35, label="tokens")
        axis.set_xlabel("decoding step")
    whole.set_ylabel("token slots held")
    whole.set_ylim(0, 1.45 * max(v.max() for v in slots.values()))
    whole.legend(ncols=2, loc="upper left", fontsize=13)
    whole.set_title(f"One request's memory ({geometry.bytes_per_token / 1e6:.2f} MB a slot)")
    low = tokens[0] - 2 * args.page_size
    close.set_ylim(max(0, low), tokens[: min(len(tokens), 65)].max() + 2 * args.page_size)
    close.set_title("The first steps: a page at a time")
    common.write_figure(args, figure)


if __name__ == "__main__":
    common.main(__doc__, run, options)
