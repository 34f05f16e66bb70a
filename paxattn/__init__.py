"""PagedAttention for JAX: paged KV memory as values and pure functions, and an engine on it.

    from paxattn import LLM, SamplingParams

    llm = LLM()  # SmolLM2-135M-Instruct
    for output in llm.generate(["Paged memory is"], SamplingParams(temperature=0)):
        print(output.outputs[0].text)

The parts: `geometry` (bytes), `kv_pool` (the pages), `allocator`, `block_tables` and `memory` (which
page is whose), `contiguous` (the traditional caches), `llama` (the model), `engine` (the loop).
"""

from paxattn.beam_search import BeamSearchParams
from paxattn.engine import LLM
from paxattn.geometry import PageGeometry
from paxattn.llama_config import LlamaConfig
from paxattn.memory import PagedMemory
from paxattn.request import CompletionOutput, Logprob, RequestOutput
from paxattn.sampling_params import SamplingParams

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "BeamSearchParams",
    "CompletionOutput",
    "LlamaConfig",
    "Logprob",
    "PageGeometry",
    "PagedMemory",
    "RequestOutput",
    "SamplingParams",
]
