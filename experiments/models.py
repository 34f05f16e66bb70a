"""The model of an experiment: the one that was asked for, or a small random one for a quick look."""

import common


def option(parser):
    """--model and --dtype."""
    parser.add_argument(
        "--model",
        help="Hugging Face folder or hub id, GGUF file or checkpoint (default: "
        "SmolLM2-135M-Instruct; --quick: a random model)",
    )
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        default="auto",
        help="of weights and cache (default: auto, the weights' own; float32 for quantised ones)",
    )


def choose(args, **sizes):
    """The model that was asked for; a quick run without one takes a `random_llama` of `sizes`."""
    from convert import load

    if not args.quick or args.model:
        common.report("loading the model ...")
        return load(args.model, args.dtype, progress=True)
    model = random_llama(args.seed, **sizes)
    common.report(
        f"quick: a random LLaMA ({model.config.num_layers} layers); its speed says nothing of a "
        "real model"
    )
    return model


# Compiles in a few seconds, and its vocabulary is the bytes.
TINY = {"layers": 1, "vocab_size": 256, "hidden_size": 64, "max_position_embeddings": 512}


def random_llama(seed, layers=4, *, vocab_size=4096, hidden_size=256, max_position_embeddings=2048):
    """A LLaMA of random weights and without a tokenizer, small enough to compile quickly."""
    import jax

    from convert import LoadedModel
    from paxattn import LlamaConfig
    from paxattn.llama import init_params

    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_layers=layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=hidden_size // 4,
        max_position_embeddings=max_position_embeddings,
    )
    params = jax.jit(init_params, static_argnums=0)(config, jax.random.key(seed))
    return LoadedModel(config, params, None, f"random-{layers}-layer")


def kv_bytes(model, page_size, pages, dtype="auto"):
    """Bytes of a pool with `pages` pages for sequences, and the null page."""
    import jax

    from paxattn import PageGeometry

    c = model.config
    dtype = jax.tree.leaves(model.params)[0].dtype if dtype == "auto" else dtype
    geometry = PageGeometry(c.num_layers, c.num_kv_heads, c.head_dim, page_size, dtype)
    return (pages + 1) * geometry.page_bytes
