"""Sizes of pages and requests against figures worked out by hand."""

import jax.numpy as jnp
import pytest

from paxattn.geometry import KNOWN_MODELS, PageGeometry


def test_llama_13b_in_16_bits():
    geometry = PageGeometry.of("llama-13b")
    # 2 (K and V) * 40 layers * 40 heads * 128 * 2 bytes
    assert geometry.bytes_per_token == 819_200
    assert geometry.request_bytes(2048) == 1_677_721_600  # 1.68 GB
    assert 1.3e9 < geometry.request_bytes(1600) < 1.32e9  # the often quoted 1.3 GB
    assert 32 * geometry.request_bytes(1600) > 40e9
    assert geometry.page_bytes == 16 * 819_200
    assert geometry.page_bytes_per_layer == 16 * 40 * 128 * 2


@pytest.mark.parametrize(
    ("model", "dtype", "expected"),
    [
        ("llama-7b", "float16", 524_288),
        ("llama-2-70b", "bfloat16", 327_680),
        ("llama-3-8b", "bfloat16", 131_072),
        ("llama-3-8b", "int8", 65_536),
        ("llama-3-8b", "float8_e4m3fn", 65_536),
        ("smollm2-135m", "float32", 46_080),
    ],
)
def test_bytes_per_token(model, dtype, expected):
    assert PageGeometry.of(model, dtype=dtype).bytes_per_token == expected


@pytest.mark.parametrize("model", sorted(KNOWN_MODELS))
def test_known_models_are_aligned_at_every_usual_page_size(model):
    for page_size in (8, 16, 32, 64, 128):
        assert PageGeometry.of(model, page_size).page_bytes_per_layer % 128 == 0


def test_pages_and_sequences_in_a_budget():
    geometry = PageGeometry(2, 1, 64, 4, jnp.float32)  # a page: 2*2*1*64*4 * 4 = 4096 bytes
    assert geometry.page_bytes == 4096
    assert geometry.pages_in(10 * 4096 + 4095) == 10
    # 9 pages beside the null page; 9 tokens need 3
    assert geometry.sequence_capacity(10 * 4096, 9) == 3
    assert [geometry.pages_for(n) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]


def test_a_budget_for_less_than_two_pages_is_refused():
    geometry = PageGeometry(2, 1, 64, 4, jnp.float32)
    with pytest.raises(ValueError, match=r"holds 1 pages of 4,096 bytes.*give 8,192 bytes"):
        geometry.pages_in(8191)


@pytest.mark.parametrize("name", ["num_layers", "num_kv_heads", "head_dim", "page_size"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_impossible_sizes(name, value):
    sizes = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 64, "page_size": 16, name: value}
    with pytest.raises(ValueError, match=f"{name} is {value}"):
        PageGeometry(**sizes, dtype=jnp.float32)


@pytest.mark.parametrize(
    ("page_size", "alignment", "good"),
    [(1, 128, 4), (3, 128, 4), (6, 128, 8), (1, 64, 2), (3, 64, 4)],
)
def test_a_misaligned_page_is_refused_with_the_next_good_size(page_size, alignment, good):
    # 1 head x 16 x 2 bytes: 32 bytes a token in each layer's array
    with pytest.raises(ValueError, match=f"the next good page_size is {good}$"):
        PageGeometry(2, 1, 16, page_size, jnp.bfloat16, alignment)
    assert PageGeometry(2, 1, 16, good, jnp.bfloat16, alignment).page_size == good


@pytest.mark.parametrize("alignment", [0, 32, 100])
def test_an_alignment_below_64_is_refused(alignment):
    with pytest.raises(ValueError, match=f"alignment is {alignment}"):
        PageGeometry(2, 1, 64, 16, jnp.bfloat16, alignment)


def test_an_unknown_model_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"llama-99b.*llama-13b"):
        PageGeometry.of("llama-99b")
