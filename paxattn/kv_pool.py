"""The KV pool: preallocated pages of keys and values, updated in place under donation."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import append_kv
from pallas_kernels.options import KVLayout

# Where the page, position and head axes stand in each layout's K and V arrays.
_K_AXES = {"NPKD": "NPKD", "NKPD": "NKPD", "KNPD": "KNPD", "NKDP": "NKDP"}
_V_AXES = {"NPKD": "NPKD", "NKPD": "NKPD", "KNPD": "KNPD", "NKDP": "NKPD"}


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["k", "v"],
    meta_fields=["layout", "dtype", "num_layers"],
)
@dataclass(frozen=True)
class KVPool:
    """Pages of keys and values.

    k, v: one array a layer, whose axes are `layout`'s: N pages, P positions, K heads, D head dim.
    Or one array for all layers, the pool being `stacked`: page n of layer l is its page l * N + n.
    Then the layer may be a traced number, and a program can loop over layers, see
    `llama.looped`.
    dtype: the numbers' type. On CPUs bfloat16 is stored as its bits in uint16, because XLA's CPU
    backend scatters into bfloat16 through a float32 copy of the whole pool (measured: 3.8 ms a
    layer at 512 pages against 8 microseconds).
    """

    k: tuple[jax.Array, ...]
    v: tuple[jax.Array, ...]
    layout: KVLayout
    dtype: str
    num_layers: int

    @property
    def stacked(self) -> bool:
        return len(self.k) < self.num_layers

    @property
    def num_pages(self) -> int:
        """N, the pages of one layer."""
        pages = self.k[0].shape[_K_AXES[self.layout].index("N")]
        return pages * len(self.k) // self.num_layers

    def of_layer(self, layer: int | jax.Array) -> tuple[jax.Array, jax.Array, int | jax.Array]:
        """The K and V arrays that hold a layer's pages, and which page of theirs is its page 0.

        `layer` is an int32 scalar; where it is traced the pool must be stacked.
        """
        if self.stacked:
            return self.k[0], self.v[0], layer * self.num_pages
        return self.k[layer], self.v[layer], 0

    @property
    def page_size(self) -> int:
        return self.k[0].shape[_K_AXES[self.layout].index("P")]

    @property
    def kv_dtype(self) -> str | None:
        """What `pallas_kernels` must be told: the numbers' type where the arrays hold bits."""
        return self.dtype if self.k[0].dtype == jnp.uint16 else None

    @property
    def nbytes(self) -> int:
        return sum(x.size * x.dtype.itemsize for x in (*self.k, *self.v))


def default_layout() -> KVLayout:
    """Pages as the platform's attention reads them fastest."""
    return "NKDP" if jax.default_backend() == "cpu" else "NPKD"


def init(
    num_layers: int,
    num_pages: int,
    page_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: Any = jnp.float32,
    layout: KVLayout | None = None,
    stacked: bool | None = None,
) -> KVPool:
    """A pool of zeros; page 0 is the null page. By default stacked on CPUs.

    Raises:
      ValueError: an unknown layout, or a size that is not positive.
    """
    layout = default_layout() if layout is None else layout
    if layout not in _K_AXES:
        raise ValueError(f"layout {layout!r} is not one of {sorted(_K_AXES)}")
    sizes = {"N": num_pages, "P": page_size, "K": num_kv_heads, "D": head_dim}
    if min(*sizes.values(), num_layers) < 1:
        raise ValueError(f"every size must be positive; got {num_layers} layers and {sizes}")
    dtype = jnp.dtype(dtype)
    as_bits = dtype == jnp.bfloat16 and jax.default_backend() == "cpu"
    storage = jnp.dtype(jnp.uint16) if as_bits else dtype
    if stacked is None:
        # Not on GPUs, whose kernels may count a layer's numbers in int32, nor where slots, which
        # are int32, could not be counted through all layers.
        fits = num_layers * num_pages * page_size <= np.iinfo(np.int32).max
        stacked = jax.default_backend() == "cpu" and fits
    arrays = 1 if stacked else num_layers
    sizes["N"] *= num_layers // arrays
    # Each layer's array is allocated by itself: one buffer cannot be donated twice.
    zeros = lambda axes: jnp.zeros([sizes[a] for a in axes], storage)  # noqa: E731
    return KVPool(
        k=tuple(zeros(_K_AXES[layout]) for _ in range(arrays)),
        v=tuple(zeros(_V_AXES[layout]) for _ in range(arrays)),
        layout=layout,
        dtype=dtype.name,
        num_layers=num_layers,
    )


def _in_each_layer(pool: KVPool, pages: jax.Array) -> jax.Array:
    """Pages [C] of the layers in one array, as that array counts them: [layers * C]."""
    first = jnp.arange(pool.num_layers // len(pool.k), dtype=jnp.int32) * pool.num_pages
    return (first[:, None] + pages[None, :]).reshape(-1)


def write(
    pool: KVPool,
    layer: int | jax.Array,  # [] int32
    k: jax.Array,  # [T, K, D]
    v: jax.Array,  # [T, K, D]
    slots: jax.Array,  # [T] int32
) -> KVPool:
    """Stores each token's key and value at its slot; slots of page 0 hold nothing."""
    dtype = jnp.dtype(pool.dtype)
    old_k, old_v, first = pool.of_layer(layer)
    if pool.stacked:
        size = pool.page_size
        in_layer = (slots >= 0) & (slots < pool.num_pages * size)
        slots = jnp.where(in_layer, slots + first * size, -1)  # -1: dropped, not another layer's
    new_k, new_v = append_kv(
        old_k,
        old_v,
        k.astype(dtype),
        v.astype(dtype),
        slots,
        kv_layout=pool.layout,
        kv_dtype=pool.kv_dtype,
    )
    assert new_v is not None  # one array is the interleaved layout's, which no pool has
    if pool.stacked:
        return replace(pool, k=(new_k,), v=(new_v,))
    return replace(
        pool,
        k=(*pool.k[:layer], new_k, *pool.k[layer + 1 :]),
        v=(*pool.v[:layer], new_v, *pool.v[layer + 1 :]),
    )


def copy_pages(
    pool: KVPool,
    sources: jax.Array,  # [C] int32
    destinations: jax.Array,  # [C] int32
) -> KVPool:
    """Copies whole pages in every layer (copy-on-write); 0 -> 0 where there is nothing to copy."""
    sources, destinations = (_in_each_layer(pool, x) for x in (sources, destinations))

    def copy(array: jax.Array, axes: str) -> jax.Array:
        index = (slice(None),) * axes.index("N")
        return array.at[(*index, destinations)].set(array[(*index, sources)])

    return replace(
        pool,
        k=tuple(copy(x, _K_AXES[pool.layout]) for x in pool.k),
        v=tuple(copy(x, _V_AXES[pool.layout]) for x in pool.v),
    )


def take_pages(pool: KVPool, pages: jax.Array) -> KVPool:
    """The contents of `pages` ([C] int32) in every layer: a pool of C pages, of the same bits.

    0, the null page, is padding and comes with whatever stands there.
    """
    pages = _in_each_layer(pool, pages)

    def take(array: jax.Array, axes: str) -> jax.Array:
        return array[(*(slice(None),) * axes.index("N"), pages)]

    return replace(
        pool,
        k=tuple(take(x, _K_AXES[pool.layout]) for x in pool.k),
        v=tuple(take(x, _V_AXES[pool.layout]) for x in pool.v),
    )


def put_pages(pool: KVPool, pages: jax.Array, contents: KVPool) -> KVPool:
    """Writes what `take_pages` took to `pages` ([C] int32, distinct); nothing where a page is 0.

    In place where the pool is donated. The contents may be NumPy arrays, as `jax.device_get`
    gives them.

    Raises:
      ValueError: contents of another layout, type or shape than the pool's pages.
    """
    wanted = jax.eval_shape(take_pages, pool, pages)
    described = [_describe(wanted), _describe(contents)]
    if described[0] != described[1]:
        raise ValueError(
            f"contents of {described[1]} cannot stand in {described[0]}: put them into a pool of "
            "the layout and type that they were taken from"
        )
    # out of range, so dropped: padding writes nothing, not even to the null page
    outside = pool.num_pages * pool.num_layers
    at = _in_each_layer(pool, pages)
    at = jnp.where(jnp.tile(pages > 0, pool.num_layers // len(pool.k)), at, outside)

    def put(array: jax.Array, new: jax.Array, axes: str) -> jax.Array:
        return array.at[(*(slice(None),) * axes.index("N"), at)].set(new, mode="drop")

    k, v = _K_AXES[pool.layout], _V_AXES[pool.layout]
    return replace(
        pool,
        k=tuple(put(x, new, k) for x, new in zip(pool.k, contents.k, strict=True)),
        v=tuple(put(x, new, v) for x, new in zip(pool.v, contents.v, strict=True)),
    )


def page_bytes(pool: KVPool) -> np.ndarray:
    """The bits of a pool on the host, [N, P, bytes] uint8: each position's, in every layer."""

    def by_position(array: np.ndarray, axes: str) -> np.ndarray:
        front = np.moveaxis(array, (axes.index("N"), axes.index("P")), (0, 1))
        layers = front.reshape(-1, pool.num_pages, *front.shape[1:])
        together = np.ascontiguousarray(np.moveaxis(layers, 0, 2))  # [N, P, layers, ...]
        return together.reshape(*together.shape[:2], -1).view(np.uint8)

    k, v = _K_AXES[pool.layout], _V_AXES[pool.layout]
    parts = [by_position(np.asarray(x), k) for x in pool.k]
    parts += [by_position(np.asarray(x), v) for x in pool.v]
    return np.concatenate(parts, axis=2)


def _describe(pool: KVPool) -> str:
    shapes = {(x.shape, y.shape, x.dtype.name) for x, y in zip(pool.k, pool.v, strict=True)}
    return f"{pool.num_layers} layers of {pool.dtype} in {pool.layout}, K, V and storage {shapes}"


def gather(
    pool: KVPool,
    layer: int | jax.Array,  # [] int32
    block_table: jax.Array,  # [M] int32
) -> tuple[jax.Array, jax.Array]:
    """One sequence's keys and values in order, each [M * P, K, D] in the pool's dtype."""
    k, v, first = pool.of_layer(layer)

    def take(array: jax.Array, axes: str) -> jax.Array:
        # Taken before any transposition.
        pages = jnp.take(array, block_table + first, axis=axes.index("N"))
        pages = jnp.einsum(f"{axes}->NPKD", pages)
        pages = pages.reshape(-1, *pages.shape[2:])
        if pool.kv_dtype:
            pages = jax.lax.bitcast_convert_type(pages, jnp.bfloat16)
        return pages

    return take(k, _K_AXES[pool.layout]), take(v, _V_AXES[pool.layout])


def fill_pages(pool: KVPool, pages: jax.Array, value: float) -> KVPool:
    """Every number of `pages` ([C] int32) becomes `value`: NaN shows who reads a freed page."""
    pages = _in_each_layer(pool, pages)
    fill = jnp.asarray(value, pool.dtype)
    if pool.kv_dtype:
        fill = jax.lax.bitcast_convert_type(fill, jnp.uint16)

    def put(array: jax.Array, axes: str) -> jax.Array:
        return array.at[(*(slice(None),) * axes.index("N"), pages)].set(fill)

    return replace(
        pool,
        k=tuple(put(x, _K_AXES[pool.layout]) for x in pool.k),
        v=tuple(put(x, _V_AXES[pool.layout]) for x in pool.v),
    )
