"""What can go wrong on the way in."""

from __future__ import annotations


class BadCheckpoint(ValueError):
    """A file or tensor that cannot be used: damaged, foreign, or not of this architecture."""


class ModelNotFound(ValueError):
    """No model could be had; the message says what was tried and what to pass instead."""
