"""Where a decode step's time goes, part by part, against what the machine could do at best.

Each part but one is a compiled program of its own on the model's real sizes: the dense layers, the
unembedding, attention over pages, the KV write and sampling; beside them the whole step, the whole
step on the traditional (contiguous) cache, two on a pool ten times larger (the sequences in its
first tenth; their pages scattered all over it), and one with weights and pool in the system's usual
pages of memory instead of huge ones. All programs take turns, round after round, so a change of the
machine's mood meets all of them alike. Parts overlap and fuse in the whole step, so their sum need
not be its time.

Page allocation is measured inside the whole step, as the sum of its operations in a trace: a program
of its own would show what it takes to start one.

The floor of a part is max(bytes / bandwidth, operations / peak), both measured in the same run:
bandwidth of reading by an update in place of a large array, peak by a large matrix product in the
same dtype or in float32, whichever is faster.

JSON keys (DIR/profile_step.json):
  environment, config
  bandwidth_bytes_per_s, peak_flops
  steps                     one object for each batch size and context:
    batch, context
    parts                     by name: median_ms, cpu_ms (CPU time of all threads), floor_ms, ratio,
                              temporary_bytes; of "allocation" only median_ms
    paged_over_contiguous     whole step on pages / on the contiguous cache, median of the rounds
    pool_10x                  whole step on a pool ten times larger / on its own pool
    pool_10x_scattered        the same where the sequences' pages lie all over the large pool
    usual_pages               whole step in usual pages of memory / in huge pages
    *_cpu                     the first three again in CPU time, which other processes disturb less
    allocation_share          page allocation / whole step, both inside the traced steps; null
                              where a trace does not name operations
  allocator                 an append and release of 256 sequences: ms with 1k and with 1M pages,
                            and `ratio`
  host                      `LLM.generate` on 8 requests: share of its time outside the programs
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from functools import partial, reduce
from pathlib import Path
from typing import Any

import common
import numpy as np
from timing import InPlace, machine, take_turns, traced

PAGE = 16
ALLOCATION = "allocation"
BEFORE = "whole step, not looked at"


def options(parser) -> None:
    parser.add_argument("--model", help="Hugging Face folder or hub id, GGUF file or checkpoint")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--batch", type=common.positive, nargs="+", help="default: 8 32; quick: 8")
    parser.add_argument(
        "--context", type=common.positive, nargs="+", help="default: 256 1024; quick: 64"
    )
    parser.add_argument(
        "--layers", type=common.positive, help="only the first ones (default: all; quick: 4)"
    )
    parser.add_argument("--rounds", type=common.positive, help="default: 15; quick: 3")


def run(args) -> None:
    import jax.numpy as jnp

    from convert import load
    from paxattn import compiler, huge_pages
    from paxattn.llama import split

    model = load(args.model, args.dtype, progress=True)
    model = first_layers(model, args.layers or (4 if args.quick else model.config.num_layers))
    dtype = jnp.dtype(args.dtype)
    parts = compiler.products(False, dtype).form.parts
    params = huge_pages.copied(split(model.params, parts), dtype)
    rounds = args.rounds or (3 if args.quick else 15)
    limits = machine(dtype)
    steps = [
        profile(model.config, params, dtype, batch, context, rounds, limits)
        for batch in args.batch or ((8,) if args.quick else (8, 32))
        for context in args.context or ((64,) if args.quick else (256, 1024))
    ]
    result = {
        "environment": common.environment(),
        "config": {
            "model": Path(model.source).name,
            "dtype": args.dtype,
            "layers": model.config.num_layers,
            "page_size": PAGE,
            "rounds": rounds,
        },
        **limits,
        "steps": steps,
        "allocator": allocator_cost(10_000 if args.quick else 1_000_000, rounds),
        "host": host_share(model, args),
    }
    path = common.write_json(args, result)
    figure = draw(args, result)
    common.report(
        "", *(describe(s) + "\n" for s in steps), closing(result), f"wrote {path}, {figure}"
    )


def first_layers(model, count: int):
    """The model cut after `count` layers."""
    if not 1 <= count <= model.config.num_layers:
        common.fail(f"--layers must be in 1..{model.config.num_layers}, got {count}")
    dropped = {f"layers_{i}" for i in range(count, model.config.num_layers)}
    return model._replace(
        config=replace(model.config, num_layers=count),
        params={k: v for k, v in model.params.items() if k not in dropped},
    )


# --- one step in parts --------------------------------------------------------------------------


def profile(config, params, dtype, batch, context, rounds, limits) -> dict[str, Any]:
    """Times every part at one batch size and context (the new token included)."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels import paged_attention
    from paxattn import compiler, contiguous, huge_pages, kv_pool, memory
    from paxattn.batch import sampling_arrays
    from paxattn.decode import decode_logits
    from paxattn.llama import Llama, looped
    from paxattn.sampling import sample

    c = config
    # As the engine compiles its decode steps.
    how = compiler.products(False, dtype)
    jit = partial(jax.jit, compiler_options=how.options)
    net = Llama(c, dtype, how.form)
    pages = -(-context // PAGE)
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, c.vocab_size, batch), jnp.int32)
    lengths = jnp.full(batch, context - 1, jnp.int32)

    def pool_of(num_pages: int):
        return kv_pool.init(c.num_layers, num_pages, PAGE, c.num_kv_heads, c.head_dim, dtype)

    def paged_memory(num_pages: int, among: int):
        """The sequences in pages 1 .. among - 1, in no order, as after a while of serving."""
        empty = memory.init(num_pages, batch, pages, PAGE)
        order = np.asarray(empty.allocator.free_list).copy()  # taken from its end, which is low
        rng.shuffle(order[num_pages - among : num_pages - 1])
        allocator = empty.allocator._replace(free_list=jnp.asarray(order))
        state = replace(empty, allocator=allocator)
        return memory.reserve(state, lengths)[0]

    def whole(ops, params, pool, state, tokens):
        with jax.named_scope(ALLOCATION):
            state, slots, _ = ops.append(state, jnp.ones(batch, bool))
        logits, pool = decode_logits(
            net, params, pool, tokens, state.block_tables, state.lengths, slots
        )
        return pool, choose(logits)

    def whole_program(ops, state, pool, weights=params):
        f = jit(partial(whole, ops), donate_argnums=1)
        return InPlace(f, weights, pool, state, tokens)

    size = batch * pages + 1
    grown = memory.append(paged_memory(size, size), jnp.ones(batch, bool))[0]
    slots = memory.slot_mapping(grown, jnp.arange(batch, dtype=jnp.int32), lengths)
    q = jnp.asarray(rng.normal(size=(batch, c.num_heads, c.head_dim)), dtype)
    kv = jnp.asarray(rng.normal(size=(batch, c.num_kv_heads, c.head_dim)), dtype)

    def attention(pool, q, tables, lengths):
        def one(layer, q):
            k, v, first = pool.of_layer(layer)
            return paged_attention(
                q,
                k,
                v,
                tables + first,
                lengths,
                sm_scale=c.head_dim**-0.5,
                kv_layout=pool.layout,
                kv_dtype=pool.kv_dtype,
            )

        return each_layer(one, q)

    def write(pool, k, slots):
        return each_layer(lambda layer, pool: kv_pool.write(pool, layer, k, k, slots), pool), ()

    def each_layer(f, x):
        if pool.stacked:  # in a loop, as the engine does it
            return jax.lax.fori_loop(0, c.num_layers, f, x)
        return reduce(lambda x, layer: f(layer, x), range(c.num_layers), x)

    def dense(params, tokens, lengths):
        attend = lambda layer, q, k, v, cache: (q, cache)  # noqa: E731
        run = partial(looped, net, params)
        if not (pool.stacked and c.has_one_window):
            run = partial(net.apply, {"params": params})
        return run(tokens, lengths, lengths, None, attend)[0]

    def as_computed(logits):  # where products are by columns, so that nothing is turned
        return logits.T if how.form.columns else logits

    def choose(logits):
        return sample(logits, sampling, zero, greedy=True, columns=how.form.columns)

    unembed = jit(lambda p, x: as_computed(net.apply({"params": p}, x, method="unembed")))
    hidden = jnp.asarray(rng.normal(size=(batch, c.hidden_size)), jnp.float32)
    computed = unembed(params, hidden)
    logits = jnp.copy(as_computed(computed))
    sampling = sampling_arrays([], batch)
    hot = sampling._replace(temperature=jnp.ones(batch, jnp.float32))
    zero = jnp.zeros(batch, jnp.int32)
    pool = huge_pages.backed(pool_of(size))
    parts_of_step: dict[str, tuple] = {
        "dense layers": (jit(dense), params, tokens, lengths),
        "unembedding": (unembed, params, hidden),
        "attention": (jit(attention), pool, q, grown.block_tables, grown.lengths),
        "greedy choice": (jit(lambda x: choose(as_computed(x))), computed),
        "sampling": (jit(partial(sample, greedy=False)), logits, hot, zero),
    }
    compiled = {name: f.lower(*xs).compile() for name, (f, *xs) in parts_of_step.items()}
    programs = {name: partial(compiled[name], *xs) for name, (_, *xs) in parts_of_step.items()}
    programs["KV write"] = InPlace(
        jit(write, donate_argnums=0), huge_pages.backed(pool_of(size)), kv, slots
    )
    of_size = paged_memory(size, size)
    reserved = contiguous.init(size, batch, pages, PAGE)
    reserved = contiguous.reserve(reserved, lengths)[0]
    on_own, on_reserved = (huge_pages.backed(pool_of(size)) for _ in range(2))
    large = 10 * size
    on_large, on_scattered = (huge_pages.backed(pool_of(large)) for _ in range(2))
    scattered = whole_program(memory, paged_memory(large, large), on_scattered)
    # Not looked at: so that a whole step goes before each of those that are compared.
    programs[BEFORE] = scattered
    programs["whole step"] = whole_program(memory, of_size, on_own)
    programs["whole step, contiguous"] = whole_program(contiguous, reserved, on_reserved)
    programs["whole step, 10x pool"] = whole_program(memory, paged_memory(large, size), on_large)
    programs["whole step, 10x pool, scattered"] = scattered
    usual_params = jax.tree.map(jnp.copy, params)
    programs["whole step, usual pages"] = whole_program(
        memory, of_size, pool_of(size), usual_params
    )
    compiled |= {n: p.program for n, p in programs.items() if isinstance(p, InPlace)}
    times = take_turns(programs, rounds)
    del times[BEFORE]

    floors = floor_seconds(c, dtype, batch, context, params, limits)
    parts = {}
    for name, t in times.items():
        median, cpu = np.median(t, axis=0)
        floor = floors.get(name.partition(",")[0])
        parts[name] = {
            "median_ms": 1e3 * median,
            "cpu_ms": 1e3 * cpu,
            "floor_ms": None if floor is None else 1e3 * floor,
            "ratio": None if floor is None else median / floor,
            "temporary_bytes": compiled[name].memory_analysis().temp_size_in_bytes,
        }
    allocation, share = traced(programs["whole step"], ALLOCATION, rounds)
    parts[ALLOCATION] = dict.fromkeys(parts["whole step"]) | {"median_ms": allocation}

    def over(name: str, other: str, column: int) -> float:
        return float(np.median(times[name][:, column] / times[other][:, column]))

    return {
        "batch": batch,
        "context": context,
        "parts": parts,
        "paged_over_contiguous": over("whole step", "whole step, contiguous", 0),
        "paged_over_contiguous_cpu": over("whole step", "whole step, contiguous", 1),
        "pool_10x": over("whole step, 10x pool", "whole step", 0),
        "pool_10x_cpu": over("whole step, 10x pool", "whole step", 1),
        "pool_10x_scattered": over("whole step, 10x pool, scattered", "whole step", 0),
        "pool_10x_scattered_cpu": over("whole step, 10x pool, scattered", "whole step", 1),
        "usual_pages": over("whole step, usual pages", "whole step", 0),
        "allocation_share": share,
    }


def floor_seconds(c, dtype, batch, context, params, limits) -> dict[str, float]:
    """The least time of each part: max(bytes / bandwidth, operations / peak)."""
    import jax

    weights = sum(x.size for x in jax.tree.leaves(params))
    head = c.vocab_size * c.hidden_size
    layers = weights - head * (1 if c.tie_word_embeddings else 2)
    item = dtype.itemsize
    held = 2 * batch * context * c.num_layers * c.num_kv_heads * c.head_dim
    dots = 4 * batch * context * c.num_layers * c.num_heads * c.head_dim
    row = 2 * batch * c.num_layers * c.num_kv_heads * c.head_dim

    def least(read, operations=0.0):
        return max(read / limits["bandwidth_bytes_per_s"], operations / limits["peak_flops"])

    floors = {
        "dense layers": least(layers * item, 2 * batch * layers),
        "unembedding": least(head * item + 4 * batch * c.vocab_size, 2 * batch * head),
        "attention": least(held * item, dots),
        "KV write": least(2 * row * item),
        "greedy choice": least(4 * batch * c.vocab_size),
        "sampling": least(4 * batch * c.vocab_size),
    }
    parts = ("dense layers", "unembedding", "attention", "KV write", "greedy choice")
    return {**floors, "whole step": sum(floors[name] for name in parts)}


# --- allocator and host -------------------------------------------------------------------------


def allocator_cost(most: int, rounds: int) -> dict[str, float]:
    """An append and a release of 256 sequences on a small and on a large pool."""
    import jax
    import jax.numpy as jnp

    from paxattn import memory

    everyone = jnp.ones(256, bool)

    def churn(state):
        state, _, _ = memory.append(state, everyone)
        return memory.release(state, everyone), ()

    programs = {}
    for pages in (1_000, most):
        f = jax.jit(churn, donate_argnums=0)
        held = [memory.init(pages, 256, 4, PAGE)]

        def call(f=f, held=held):
            held[0], rest = f(held[0])
            return held[0], rest

        programs[str(pages)] = call
    times = take_turns(programs, 20 * rounds)
    small, large = (float(np.median(times[str(p)][:, 0])) for p in (1_000, most))
    return {"pages": most, "small_ms": 1e3 * small, "large_ms": 1e3 * large, "ratio": large / small}


def host_share(model, args) -> dict[str, float]:
    """The share of `generate` that is not spent in the programs and their answers."""
    from paxattn import LLM, SamplingParams

    llm = LLM(model, dtype=args.dtype, max_num_seqs=8, max_model_len=128)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(1, model.config.vocab_size, 20).tolist() for _ in range(8)]
    params = [
        SamplingParams(temperature=0, max_tokens=8 + 4 * i, ignore_eos=True) for i in range(8)
    ]
    llm.generate(prompts, params)
    llm.history = []
    began = time.perf_counter()
    llm.generate(prompts, params)
    total = time.perf_counter() - began
    inside = sum(h.seconds for h in llm.history)
    return {
        "seconds": total,
        "outside_programs_share": 1 - inside / total,
        "program_runs": len(llm.history),
    }


# --- what the user sees -------------------------------------------------------------------------


def describe(step: dict) -> str:
    rows = [
        [
            name,
            part["median_ms"],
            part["cpu_ms"],
            part["floor_ms"],
            part["ratio"],
            None if part["temporary_bytes"] is None else part["temporary_bytes"] / 2**20,
        ]
        for name, part in step["parts"].items()
    ]
    headers = ["", "ms", "CPU ms", "floor ms", "ms/floor", "temporaries MiB"]
    table = common.table(
        headers, rows, f"{step['batch']} sequences of {step['context']} tokens, one step"
    )
    share = "unknown" if step["allocation_share"] is None else f"{step['allocation_share']:.2%}"
    return (
        f"{table}\npaged / contiguous {step['paged_over_contiguous']:.3f} (CPU time "
        f"{step['paged_over_contiguous_cpu']:.3f}); pool 10x larger {step['pool_10x']:.3f} "
        f"({step['pool_10x_cpu']:.3f}), pages all over it {step['pool_10x_scattered']:.3f} "
        f"({step['pool_10x_scattered_cpu']:.3f}); usual pages {step['usual_pages']:.3f}; "
        f"allocation {share} of the step"
    )


def closing(result: dict) -> str:
    a, h = result["allocator"], result["host"]
    load = f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown"
    return (
        f"memory {result['bandwidth_bytes_per_s'] / 1e9:.1f} GB/s, products "
        f"{result['peak_flops'] / 1e9:,.0f} GFLOP/s; allocator {a['pages']:,} pages / 1,000 pages "
        f"{a['ratio']:.2f}; host {h['outside_programs_share']:.1%} of generate; load average {load}"
    )


def draw(args, result: dict) -> Path:
    """Stacked bars: the parts of a step beside their floors."""
    common.style()
    import matplotlib.pyplot as plt

    names = ("dense layers", "unembedding", "attention", "KV write", "allocation", "greedy choice")
    steps = result["steps"]
    figure, axis = plt.subplots(figsize=(3 * len(steps) + 5, 6))
    for i, step in enumerate(steps):
        for x, key in ((i - 0.2, "median_ms"), (i + 0.2, "floor_ms")):
            bottom = 0.0
            for name, colour in zip(names, common.PALETTE, strict=False):
                height = step["parts"][name][key] or 0.0
                axis.bar(
                    *(x, height),
                    width=0.36,
                    bottom=bottom,
                    color=colour,
                    alpha=1.0 if key == "median_ms" else 0.45,
                    label=name if (i, key) == (0, "median_ms") else None,
                )
                bottom += height
        whole = step["parts"]["whole step"]["median_ms"]
        axis.plot([i - 0.4, i], [whole, whole], "k-", label="whole step" if i == 0 else None)
    labels = [f"{s['batch']} x {s['context']}" for s in steps]
    axis.set_xticks(range(len(steps)), labels)
    axis.set(
        xlabel="sequences x tokens (left: measured, right: floor)",
        ylabel="milliseconds",
        title=f"A decode step of {result['config']['model']} in {result['config']['dtype']}",
    )
    axis.grid(visible=False, axis="x")
    axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return common.write_figure(args, figure)


if __name__ == "__main__":
    common.main(__doc__, run, options)
