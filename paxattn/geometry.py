"""Sizes of the KV cache: bytes of a token, a page and a request, and pages in a budget."""

import dataclasses

import jax.numpy as jnp
import numpy as np

#: Layers, KV heads and head dimension of well-known models, from their published configurations.
KNOWN_MODELS: dict[str, tuple[int, int, int]] = {
    "llama-7b": (32, 32, 128),
    "llama-13b": (40, 40, 128),
    "llama-30b": (60, 52, 128),
    "llama-65b": (80, 64, 128),
    "llama-2-7b": (32, 32, 128),
    "llama-2-13b": (40, 40, 128),
    "llama-2-70b": (80, 8, 128),
    "llama-3-8b": (32, 8, 128),
    "llama-3-70b": (80, 8, 128),
    "llama-3.1-405b": (126, 8, 128),
    "llama-3.2-1b": (16, 8, 64),
    "llama-3.2-3b": (28, 8, 128),
    "mistral-7b": (32, 8, 128),
    "tinyllama-1.1b": (22, 4, 64),
    "qwen2-7b": (28, 4, 128),
    "smollm2-135m": (30, 3, 64),
    "smollm2-360m": (32, 5, 64),
    "smollm2-1.7b": (24, 32, 64),
    "opt-13b": (40, 40, 128),
}


@dataclasses.dataclass(frozen=True)
class PageGeometry:
    """The shape of a page and what follows from it.

    A page is ``page_size`` consecutive token positions. Each layer has an array of keys and one
    of values, so a page stands in ``2 * num_layers`` arrays. In each of them its bytes must be a
    multiple of ``alignment``: then every page starts on a cache line and on a GPU's memory
    transaction, and no read of one page touches the lines of another.

    Args:
      num_layers: L.
      num_kv_heads: K.
      head_dim: D.
      page_size: P, tokens in a page.
      dtype: element type of the stored keys and values.
      alignment: 128 bytes, or 64 for devices whose memory transaction is no larger.

    Raises:
      ValueError: for a size below 1, an alignment other than a multiple of 64, or a page whose
        bytes are no multiple of it; the message names the next page size that fits.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: np.dtype
    alignment: int = 128

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", jnp.dtype(self.dtype))
        for name in ("num_layers", "num_kv_heads", "head_dim", "page_size"):
            value = getattr(self, name)
            if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} is {value!r}; it must be an integer of at least 1")
        if self.alignment < 64 or self.alignment % 64:
            raise ValueError(
                f"alignment is {self.alignment} bytes; it must be a multiple of 64 (128 is usual)"
            )
        if self.page_bytes_per_layer % self.alignment:
            good = self._next_aligned_page_size()
            raise ValueError(
                f"a page of {self.page_size} tokens x {self.num_kv_heads} KV heads x "
                f"{self.head_dim} x {self.dtype.itemsize} bytes ({self.dtype.name}) is "
                f"{self.page_bytes_per_layer} bytes in each layer's array, no multiple of "
                f"{self.alignment}, so pages would share cache lines; the next good page_size "
                f"is {good}"
            )

    @classmethod
    def of(
        cls, model: str, page_size: int = 16, dtype: str = "bfloat16", alignment: int = 128
    ) -> "PageGeometry":
        """The geometry of a model in :data:`KNOWN_MODELS`.

        >>> PageGeometry.of("llama-13b").bytes_per_token
        819200

        Raises:
          ValueError: for a model that is not listed.
        """
        if model not in KNOWN_MODELS:
            known = ", ".join(sorted(KNOWN_MODELS))
            raise ValueError(f"no geometry is known for {model!r}; known models: {known}")
        return cls(*KNOWN_MODELS[model], page_size, jnp.dtype(dtype), alignment)

    @property
    def bytes_per_token(self) -> int:
        """Keys and values of one token in all layers: ``2 * L * K * D * itemsize``."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def page_bytes_per_layer(self) -> int:
        """One page in one layer's array of keys (the array of values has as many)."""
        return self.page_size * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def page_bytes(self) -> int:
        """One page in all layers, keys and values."""
        return self.page_size * self.bytes_per_token

    def pages_for(self, tokens: int) -> int:
        """Pages that hold so many tokens of one sequence."""
        return -(-tokens // self.page_size)

    def request_bytes(self, tokens: int) -> int:
        """KV bytes that a sequence of so many tokens needs, without any page's unused rest."""
        return tokens * self.bytes_per_token

    def pages_in(self, budget_bytes: int) -> int:
        """N: pages that a byte budget pays for, the null page included.

        Raises:
          ValueError: if the budget does not pay for the null page and one more.
        """
        pages = budget_bytes // self.page_bytes
        if pages < 2:
            raise ValueError(
                f"a budget of {budget_bytes:,} bytes holds {max(pages, 0)} pages of "
                f"{self.page_bytes:,} bytes; at least 2 are needed (one is the null page), "
                f"so give {2 * self.page_bytes:,} bytes or more, or a smaller page_size"
            )
        return pages

    def sequence_capacity(self, budget_bytes: int, tokens: int) -> int:
        """Sequences of so many tokens each that fit in a byte budget at once."""
        return (self.pages_in(budget_bytes) - 1) // self.pages_for(max(tokens, 1))

    def _next_aligned_page_size(self) -> int:
        one = self.num_kv_heads * self.head_dim * self.dtype.itemsize
        step = self.alignment // np.gcd(self.alignment, one)
        return int(-(-self.page_size // step) * step)
