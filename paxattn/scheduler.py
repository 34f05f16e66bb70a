"""Which sequence runs next: plain Python over plain numbers, no arrays.

First come, first served. What comes and goes is a group: the samples of one prompt, or a sequence
alone. It is admitted when its rows and its tokens' pages are free; it never overtakes an older one.
Its first member computes the prompt, and the others then share those pages. When pages run out, the
youngest group that runs gives its pages back and waits at the head of the queue; its tokens are
replayed when it returns.
"""

from collections import deque
from collections.abc import Iterable
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
        self.waiting: deque[list[Sequence]] = deque()
        self.running: list[Sequence] = []  # oldest admission first
        self.free_rows = list(range(rows - 1, -1, -1))

    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, group: list[Sequence]) -> None:
        for sequence in group:
            sequence.group = group
        self.waiting.append(group)

    def pages(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def admit(self, free_pages: int) -> list[Sequence]:
        """Moves from waiting to running what fits now, in order, and gives each member a row.

        Returns the first member of each group: the one that computes the prompt.
        """
        admitted = []
        while (group := self.next_group()) is not None and group[0].swapped is None:
            first = group[0]
            prompt = self.pages(len(first.prompt_ids))
            if not self.reserved and prompt + self.beyond_prompt(group) > free_pages:
                break
            free_pages -= prompt
            admitted.append(self.place())
        return admitted

    def next_group(self) -> list[Sequence] | None:
        """The oldest group that waits, if there are rows for it."""
        if self.waiting and len(self.waiting[0]) <= len(self.free_rows):
            return self.waiting[0]
        return None

    def beyond_prompt(self, group: list[Sequence]) -> int:
        """Pages that must be free beside the group's prompt for it to be admitted now."""
        pages = 0
        first = group[0]
        prompt, full = self.pages(len(first.prompt_ids)), len(first.prompt_ids) // self.page_size
        for sequence in group:
            pages += self.pages(len(sequence.prompt_ids) + len(sequence.outputs)) - prompt
        pages += (len(group) - 1) * (prompt - full)
        return pages + self.next_tokens()

    def next_tokens(self, group: Iterable[Sequence] = ()) -> int:
        """Pages that the next token of each running sequence, and of a group's, will take.

        And those that running prompts will be copied to. They come first: otherwise whoever comes
        in would be put back at once.
        """
        next_ones = sum(s.stored % self.page_size == 0 for s in (*self.decoding(), *group))
        return next_ones + self._owed()

    def _owed(self) -> int:
        """Pages that the copies of partial prompt pages will take, for prompts not computed yet."""
        return sum(
            len(s.prompt_ids) % self.page_size > 0 for s in self.running if s.parent is not None
        )

    def place(self) -> Sequence:
        """Lets the oldest waiting group run; returns the member that computes the prompt."""
        group = self.waiting.popleft()
        swapped = group[0].swapped is not None  # then its pages come back with it
        for sequence in group:
            sequence.row = self.free_rows.pop()
            self.running.append(sequence)
            if not swapped:
                sequence.stored = sequence.dropped = 0
                sequence.parent = None if sequence is group[0] else group[0]
        return group[0]

    def prefill_chunks(self, tokens: int, sequences: int) -> list[Chunk]:
        """Prompt parts to compute next: at most `tokens` tokens for `sequences` samples."""
        chunks: list[Chunk] = []
        for sequence in self.running:
            if sequence.prefilled or sequence.parent is not None:
                continue
            samples = 1 + len(children(sequence))
            if tokens == 0 or samples > sequences:
                break
            count = min(tokens, len(sequence.prompt_ids) - sequence.stored)
            chunks.append(Chunk(sequence, sequence.stored, count))
            tokens -= count
            sequences -= samples
        return chunks

    def decoding(self) -> list[Sequence]:
        return [s for s in self.running if s.prefilled]

    def starved(self, free_pages: int) -> bool:
        """Whether the next token of every running sequence needs more pages than are free."""
        if self.reserved:
            return False
        return self.next_tokens() > free_pages

    def several_groups(self) -> bool:
        return bool(self.running) and self.running[0].group is not self.running[-1].group

    def preempt(self, keep: bool = False) -> list[int]:
        """Puts the youngest running group back at the head of the queue; returns its rows.

        `keep`: what it has stored is kept elsewhere, so nothing need be computed again.
        """
        group = self.running[-1].group
        rows = [s.row for s in group]
        for sequence in group:
            self.running.remove(sequence)
            self._leave(sequence)
            if not keep:
                sequence.stored = 0
            sequence.preemptions += 1
        self.waiting.appendleft(group)
        return rows

    def finish(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        sequence.group.remove(sequence)
        self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        self.free_rows.append(sequence.row)
        sequence.row = -1


def children(sequence: Sequence) -> list[Sequence]:
    """The members of its group that wait for the prompt that it computes."""
    return [s for s in sequence.group if s.parent is sequence]
