"""Which sequence runs next: plain Python over plain numbers, no arrays.

First come, first served. A sequence is admitted when a row is free and its tokens' pages are free;
it never overtakes an older one. When pages run out, the youngest one running gives its pages back
and waits at the head of the queue; its tokens are replayed when it returns.
"""

from collections import deque
from dataclasses import dataclass

from paxattn.request import Sequence


@dataclass(frozen=True)
class Chunk:
    """Part of a prompt to compute: tokens [start, start + count) of a sequence."""

    sequence: Sequence
    start: int
    count: int


class Scheduler:
    """Queues of sequences, and which memory row each one holds.

    Args:
      rows: sequences that can run at once.
      page_size: tokens in a page.
      reserved: each row has its room for ever (the traditional cache), so pages are not counted.
    """

    def __init__(self, rows: int, page_size: int, reserved: bool = False):
        self.page_size = page_size
        self.reserved = reserved
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # oldest admission first
        self.free_rows = list(range(rows - 1, -1, -1))
        self.preemptions = 0

    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def pages(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def admit(self, free_pages: int) -> list[Sequence]:
        """Moves from waiting to running what fits now, in order, and gives each a row."""
        admitted = []
        while self.waiting and self.free_rows:
            first = self.waiting[0]
            need = self.pages(len(first.prompt_ids) + len(first.outputs))
            # The running ones' next tokens come first: otherwise it would be put back at once.
            headroom = sum(s.stored % self.page_size == 0 for s in self.decoding())
            if not self.reserved and need + headroom > free_pages:
                break
            free_pages -= self.pages(len(first.prompt_ids))
            self.waiting.popleft()
            first.row = self.free_rows.pop()
            first.stored = 0
            self.running.append(first)
            admitted.append(first)
        return admitted

    def prefill_chunks(self, tokens: int, sequences: int) -> list[Chunk]:
        """Prompt parts to compute next: at most `tokens` tokens of at most `sequences`."""
        chunks: list[Chunk] = []
        for sequence in self.running:
            if sequence.prefilled:
                continue
            if tokens == 0 or len(chunks) == sequences:
                break
            count = min(tokens, len(sequence.prompt_ids) - sequence.stored)
            chunks.append(Chunk(sequence, sequence.stored, count))
            tokens -= count
        return chunks

    def decoding(self) -> list[Sequence]:
        return [s for s in self.running if s.prefilled]

    def starved(self, free_pages: int) -> bool:
        """Whether the next token of every running sequence needs more pages than are free."""
        if self.reserved:
            return False
        return sum(s.stored % self.page_size == 0 for s in self.decoding()) > free_pages

    def preempt(self) -> Sequence:
        """Puts the youngest running sequence back at the head of the queue."""
        youngest = self.running.pop()
        self._leave(youngest)
        youngest.stored = 0
        youngest.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(youngest)
        return youngest

    def finish(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        self.free_rows.append(sequence.row)
        sequence.row = -1
