"""Weights in: Hugging Face folders and GGUF files to Flax parameters and Orbax checkpoints.

`load` reads any of them; `python -m convert MODEL OUT_DIR` writes an Orbax checkpoint, which
loads again faster and without conversion.
"""

import os

# transformers is here for its tokenizers alone; it need not advise installing PyTorch.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

from convert.errors import BadCheckpoint, ModelNotFound
from convert.load import LoadedModel, load, load_tokenizer

__all__ = ["BadCheckpoint", "LoadedModel", "ModelNotFound", "load", "load_tokenizer"]
