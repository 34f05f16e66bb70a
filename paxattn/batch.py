"""Sequences turned into the padded arrays of one program call, and its results read back."""

import numpy as np

from paxattn.decode import MAX_STEPS, Choice, DecodeInputs, PrefillInputs
from paxattn.request import Sequence
from paxattn.sampling import SamplingArrays
from paxattn.sampling_params import MAX_LOGPROBS
from paxattn.scheduler import Chunk, children

# (packed tokens, samples) of one prefill, and the fewest rows of one decode. In multiples of eight
# XLA's CPU backend gives a row the same bits in every bucket; otherwise its vector loops differ.
# A sample's logits are not cheap (128 of them took a sixth of a prefill of 512
# tokens), so the last bucket is for many samples of few prompts only.
PREFILL_BUCKETS = ((64, 16), (256, 16), (512, 32), (512, 128))
FEWEST_ROWS = 8
_INT32 = np.iinfo(np.int32).max


def row_bucket(rows: int) -> int:
    """Rows padded to 8, 16, 24, 32, 48, 64, 96, ...: few programs, and little padding."""
    most = max(FEWEST_ROWS, 1 << (rows - 1).bit_length())
    between = most * 3 // 4
    return between if rows <= between and between % FEWEST_ROWS == 0 else most


def row_bucket_below(rows: int) -> int:
    """The bucket that is next below the bucket `rows`; 0 below the smallest."""
    below = (row_bucket(n) for n in (rows // 2, rows * 2 // 3))
    return max((bucket for bucket in below if bucket < rows), default=0)


def prefill_bucket(chunks: list[Chunk]) -> tuple[int, int]:
    """The smallest (tokens, samples) bucket that holds the chunks."""
    tokens = sum(c.count for c in chunks)
    samples = len(sampled_sequences(chunks))
    return next((t, s) for t, s in PREFILL_BUCKETS if t >= tokens and s >= samples)


def sampled_sequences(chunks: list[Chunk]) -> list[Sequence]:
    """Whose next token each sampled one is: every chunk's sequence and those that fork from it."""
    return [member for c in chunks for member in (c.sequence, *children(c.sequence))]


def prefill_inputs(chunks: list[Chunk], tokens: int, samples: int) -> PrefillInputs:
    """Chunks packed one after another into `tokens` places, for at most `samples` samples."""
    total = sum(c.count for c in chunks)
    inputs = PrefillInputs(
        tokens=np.zeros(tokens, np.int32),
        positions=np.zeros(tokens, np.int32),
        context_lens=np.zeros(tokens, np.int32),
        token_rows=np.full(tokens, -1, np.int32),
        seq_rows=np.full(samples, -1, np.int32),
        cu_q_lens=np.full(samples + 1, total, np.int32),
        kv_lens=np.zeros(samples, np.int32),
        num_seqs=np.asarray([len(chunks)], np.int32),
        sampled_at=np.zeros(samples, np.int32),
        generated=np.zeros(samples, np.int32),
    )
    at = sampled = 0
    for i, (sequence, start, count) in enumerate((c.sequence, c.start, c.count) for c in chunks):
        here = slice(at, at + count)
        inputs.tokens[here] = sequence.prompt_ids[start : start + count]
        inputs.positions[here] = np.arange(start, start + count)
        inputs.context_lens[here] = len(sequence.prompt_ids)
        inputs.token_rows[here] = sequence.row
        inputs.seq_rows[i] = sequence.row
        inputs.cu_q_lens[i] = at
        inputs.kv_lens[i] = start + count
        at += count
        members = 1 + len(children(sequence))
        inputs.sampled_at[sampled : sampled + members] = at - 1
        sampled += members
    return inputs


def decode_inputs(sequences: list[Sequence], rows: int, steps: int, enough: int) -> DecodeInputs:
    """One row a sequence, padded to `rows`."""
    inputs = DecodeInputs(
        rows=np.full(rows, -1, np.int32),
        tokens=np.zeros(rows, np.int32),
        generated=np.zeros(rows, np.int32),
        limit=np.zeros(rows, np.int32),
        forced=np.zeros((rows, MAX_STEPS), np.int32),
        num_forced=np.zeros(rows, np.int32),
        steps=np.int32(steps),
        enough=np.int32(enough),
    )
    for i, s in enumerate(sequences):
        inputs.rows[i] = s.row
        inputs.tokens[i] = s.outputs[s.in_play - 1]
        inputs.generated[i] = s.in_play
        inputs.limit[i] = s.limit
        replay = s.outputs[s.in_play : s.in_play + MAX_STEPS]
        inputs.forced[i, : len(replay)] = replay
        inputs.num_forced[i] = len(replay)
    return inputs


def choice_of(sequences: list[Sequence]) -> Choice:
    """How the program that serves these sequences must choose tokens."""
    return Choice(
        greedy=all(s.params.temperature == 0 for s in sequences),
        logprobs=MAX_LOGPROBS if any(s.params.logprobs is not None for s in sequences) else 0,
    )


def sampling_arrays(sequences: list[Sequence], rows: int) -> SamplingArrays:
    """The sampling parameters of each row."""
    width = 4
    while width < max((len(s.stop_ids) for s in sequences), default=0):
        width *= 2
    arrays = SamplingArrays(
        temperature=np.zeros(rows, np.float32),
        top_k=np.zeros(rows, np.int32),
        top_p=np.ones(rows, np.float32),
        min_p=np.zeros(rows, np.float32),
        seed=np.zeros((rows, 2), np.uint32),
        min_tokens=np.zeros(rows, np.int32),
        stop_ids=np.full((rows, width), -1, np.int32),
    )
    for i, s in enumerate(sequences):
        p = s.params
        arrays.temperature[i] = p.temperature
        arrays.top_k[i] = min(max(p.top_k, 0), _INT32)
        arrays.top_p[i] = p.top_p
        arrays.min_p[i] = p.min_p
        arrays.seed[i] = s.seed
        arrays.min_tokens[i] = min(p.min_tokens, _INT32)
        arrays.stop_ids[i, : len(s.stop_ids)] = s.stop_ids
    return arrays


def pick(sampled, at) -> tuple[int, tuple | None]:
    """The token at a place of a program's `Sampled`, and its log-probabilities if it has any."""
    token = int(sampled.tokens[at])
    if sampled.logprobs is None:
        return token, None
    return token, (sampled.logprobs[at], sampled.top_ids[at], sampled.top_logprobs[at])
