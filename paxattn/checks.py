"""Numbers that a user hands in, refused by name."""

import numbers
from typing import Any

MOST = 2.0**127  # a number beyond it may not fit in float32


def is_integer(value: Any) -> bool:
    """Whether it is a whole number, Python's or NumPy's."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def integer(name: str, value: Any, low: int, high: int | None = None) -> int:
    """The value as an int: those of NumPy overflow.

    Raises:
      ValueError: it is none, or not in [low, high].
    """
    if not is_integer(value):
        raise ValueError(f"{name} must be an integer; got {value!r}")
    if int(value) < low or (high is not None and int(value) > high):
        bound = f"at least {low}" if high is None else f"between {low} and {high}"
        raise ValueError(f"{name} must be {bound}; got {value}")
    return int(value)


def number(name: str, value: Any, low: float, high: float = MOST) -> None:
    """Raises ValueError for what is no number in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(f"{name} must be a number; got {value!r}")
    found: Any = value  # compared as it is: an integer may be too large for a float
    if not low <= found <= high:
        raise ValueError(f"{name} must be a finite number in [{low:g}, {high:g}]; got {value}")
