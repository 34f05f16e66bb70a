"""How many pages, rows and tokens an engine has, from a byte budget."""

import os
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from paxattn.checks import integer
from paxattn.geometry import PageGeometry
from paxattn.llama_config import LlamaConfig

CPU_BUDGET = 1 << 30  # bytes: of a KV pool on a CPU when none is given


@dataclass(frozen=True)
class Capacity:
    """The sizes of an engine's memory.

    num_pages counts the null page. In a reserved (traditional) cache each of `max_rows` rows has
    `pages_per_seq` pages for itself; in a paged one all rows share all pages.
    """

    page_size: int
    num_pages: int
    pages_per_seq: int
    max_rows: int
    max_model_len: int
    bytes_per_page: int
    reserved: bool

    @property
    def pool_tokens(self) -> int:
        """Tokens that one sequence can store when it has the memory to itself."""
        return min(self.pages_per_seq, self.num_pages - 1) * self.page_size

    def refusal(self, prompt_tokens: int) -> str | None:
        """Why a prompt can never run here, or None."""
        if prompt_tokens >= self.max_model_len:
            return (
                f"its {prompt_tokens} tokens leave no room for an output token: a sequence has at "
                f"most max_model_len={self.max_model_len} tokens; shorten it or raise max_model_len"
            )
        if prompt_tokens > self.pool_tokens:
            return (
                f"its {prompt_tokens} tokens need {-(-prompt_tokens // self.page_size)} pages, "
                f"but the whole pool has {self.num_pages - 1} pages of {self.page_size} tokens; "
                "shorten it or raise kv_cache_bytes"
            )
        return None

    def max_outputs(self, prompt_tokens: int) -> int:
        """Output tokens that a prompt can get; the last one is never stored."""
        return min(self.max_model_len, self.pool_tokens + 1) - prompt_tokens

    def group_outputs(self, prompt_tokens: int, samples: int) -> int:
        """The same for each of several samples that share the prompt's full pages.

        All of them together must fit the pool, for they run together or not at all.
        """
        if samples == 1 or self.reserved:
            return self.max_outputs(prompt_tokens)
        shared = prompt_tokens // self.page_size
        own = (self.num_pages - 1 - shared) // samples
        room = (shared + own) * self.page_size + 1 - prompt_tokens
        return min(room, self.max_outputs(prompt_tokens))

    def group_refusal(
        self, prompt_tokens: int, samples: int, most: int, option: str = "n"
    ) -> str | None:
        """Why so many samples of a prompt can never run together, or None; `most` samples may.

        `option` is what the caller asked for them with.
        """
        if samples == 1 or self.reserved:
            return None
        if samples > min(most, self.max_rows):
            return (
                f"{option}={samples} completions run together, but at most "
                f"{min(most, self.max_rows)} sequences can; lower {option}"
                + (" or raise max_num_seqs" if self.max_rows < most else "")
            )
        if self.group_outputs(prompt_tokens, samples) < 1:
            return (
                f"{option}={samples} completions of {prompt_tokens} tokens do not fit the pool of "
                f"{self.num_pages - 1} pages together; lower {option} or raise kv_cache_bytes"
            )
        return None


def plan_capacity(
    config: LlamaConfig,
    *,
    dtype: jnp.dtype,
    page_size: int,
    kv_cache_bytes: int | None,
    max_model_len: int | None,
    max_num_seqs: int,
    reserved: bool,
) -> Capacity:
    """Divides a byte budget into pages.

    Raises:
      ValueError: an option that is no positive integer, a misaligned page, or a budget too small
        for one page (or, reserved, for one sequence of max_model_len).
    """
    if max_model_len is None:
        max_model_len = config.max_position_embeddings
    max_model_len = integer("max_model_len", max_model_len, 1)
    max_num_seqs = integer("max_num_seqs", max_num_seqs, 1)
    if max_model_len > config.max_position_embeddings:
        raise ValueError(
            f"max_model_len={max_model_len} is more than the model's max_position_embeddings="
            f"{config.max_position_embeddings}"
        )
    if max_model_len < 2:
        raise ValueError("max_model_len must be at least 2: one prompt and one output token")
    geometry = PageGeometry(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        page_size=page_size,
        dtype=dtype,
    )
    page = geometry.page_bytes
    pages_per_seq = -(-max_model_len // page_size)
    # The null page is part of the budget: the pool never takes more than it was given.
    full = (max_num_seqs * pages_per_seq + 1) * page
    if kv_cache_bytes is None:
        budget = max(_default_budget(), (pages_per_seq + 1) * page)
    else:
        budget = integer("kv_cache_bytes", kv_cache_bytes, 1)
    _check_memory(min(budget, full), page_size, kv_cache_bytes)
    pages = geometry.pages_in(min(budget, full)) - 1
    rows = max_num_seqs
    tables = 4 * rows * pages_per_seq  # bytes; a quarter of a gigabyte harms nobody
    if tables > max(pages * page, 2**28):
        raise ValueError(
            f"max_num_seqs={max_num_seqs}: the block tables of so many sequences take {tables:,} "
            f"bytes, more than the pool of {pages * page:,}; lower max_num_seqs"
        )
    if reserved:
        rows = min(max_num_seqs, pages // pages_per_seq)
        if rows < 1:
            raise ValueError(
                f"kv_cache_bytes={budget} is too small for one sequence of max_model_len="
                f"{max_model_len}, which reserves {pages_per_seq} pages of {page} bytes beside "
                f"the null page; give at least {(pages_per_seq + 1) * page} or lower max_model_len"
            )
    return Capacity(page_size, pages + 1, pages_per_seq, rows, max_model_len, page, reserved)


def _check_memory(pool: int, page_size: int, kv_cache_bytes: int | None) -> None:
    """Refuses a pool that this machine cannot hold; a GPU's memory is left to its allocator."""
    if jax.default_backend() != "cpu" or pool <= (memory := _physical_memory()):
        return
    raise ValueError(
        f"the KV pool would take {pool:,} bytes, and this machine has {memory:,}; "
        + (
            f"lower kv_cache_bytes={kv_cache_bytes}"
            if kv_cache_bytes
            else f"one sequence of max_model_len tokens in pages of page_size={page_size} needs "
            "it: lower one of the two"
        )
    )


def _physical_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _default_budget() -> int:
    device = jax.local_devices()[0]
    stats = device.memory_stats() if device.platform == "gpu" else None
    if stats and "bytes_limit" in stats:
        return int(0.8 * (stats["bytes_limit"] - stats.get("bytes_in_use", 0)))
    return min(CPU_BUDGET, _physical_memory() // 4)
