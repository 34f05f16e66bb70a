"""The model of an experiment: the one that was asked for, or a small random one for a quick look."""

import common


def option(parser):
    """--model and --dtype."""
    parser.add_argument(
        "--model",
        help="Hugging Face folder or hub id, GGUF file or checkpoint (default: "
        "SmolLM2-135M-Instruct; --quick: a random model)",
    )
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")


def choose(args, layers=4):
    """The model that was asked for; a quick run without one takes a random LLaMA of `layers`."""
    from convert import load

    if not args.quick or args.model:
        common.report("loading the model ...")
        return load(args.model, args.dtype, progress=True)
    common.report(
        f"quick: a random LLaMA ({layers} layers); its speed says nothing of a real model"
    )
    return random_llama(args.seed, layers)


def random_llama(seed, layers=4):
    """A LLaMA of random weights, small enough that its programs compile in seconds."""
    import jax

    from convert import LoadedModel
    from paxattn import LlamaConfig
    from paxattn.llama import init_params

    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=512,
        num_layers=layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
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
