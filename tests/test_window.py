"""Pages that left a sliding window go back, and nothing that is read ever names them again."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import tiny

from paxattn import LLM, SamplingParams, memory
from paxattn.invariants import broken, check

PAGE = 2 * 2 * 2 * 16 * 4 * 8  # bytes of an 8-token page: k and v, layers, heads, dim, float32


def test_stale_entries_never_name_a_recycled_page():
    release_before = jax.jit(memory.release_before)
    state = memory.init(12, 3, 6, 4)
    state, _ = memory.reserve(state, jnp.asarray([18, 7, 0], jnp.int32))
    positions = jnp.asarray([11, 3, 0], jnp.int32)  # pages 0 and 1 of row 0; nothing of row 1
    state = release_before(state, positions)
    assert state.block_tables[0].tolist() == [0, 0, 3, 4, 5, 0]
    assert state.block_tables[1].tolist() == [6, 7, 0, 0, 0, 0]
    assert not broken(check(state, released_before=positions))
    assert set(broken(check(state))) == {"pages_missing"}
    state, ok = memory.reserve(state, jnp.asarray([18, 7, 8], jnp.int32))
    assert ok.tolist() == [True, True, True]
    recycled = set(np.asarray(state.block_tables[2]).tolist()) - {0}
    assert recycled == {1, 2}
    assert not recycled & set(np.asarray(state.block_tables[:2]).ravel().tolist())
    again = release_before(state, positions)  # nothing is given back twice
    assert int(again.allocator.num_free) == int(state.allocator.num_free)
    state = memory.release(state, jnp.ones(3, bool))
    assert int(state.allocator.num_free) == 11
    assert not broken(check(state))


def test_the_engine_gives_windows_back_and_tokens_are_the_same():
    config = dataclasses.replace(tiny.CONFIG, sliding_window=20)
    loaded = tiny.model(config)
    prompts = tiny.prompts(4, longest=60)
    params = SamplingParams(temperature=0, max_tokens=70, ignore_eos=True)

    def run(keep):
        llm = LLM(
            loaded,
            page_size=8,
            max_num_seqs=4,
            compilation_cache=False,
            kv_cache_bytes=PAGE * 40,
        )
        if keep:
            llm._device._window = None
        llm.history = []
        outputs = [o.outputs[0].token_ids for o in llm.generate(prompts, params)]
        assert llm.stats()["pages_free"] == llm.stats()["pages_total"]
        return outputs, max(39 - r.free_pages for r in llm.history if r.kind == "decode")

    kept, most = run(keep=True)
    released, fewer = run(keep=False)
    assert released == kept
    # Window and one program's 32 steps are 52 tokens, at most eight pages for each of four rows.
    assert fewer < most
    assert fewer <= 32
