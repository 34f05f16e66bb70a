"""The gradient of ragged attention (placeholder until the backward pass lands)."""

from pallas_kernels.xla_ragged import ragged

__all__ = ["ragged"]
