"""Which rows make up the batch of a step, and which part of it a rank computes.

    epochs     | permutation 0 of all n rows         | permutation 1             | ...    one endless stream
    batches    | b0 | b1 | b2 | b3 | b4 | b5 | b6 | b7 | b8 | b9 | ...                    batch_size rows each
    windows    [ some batches of one epoch      ] ^ [ ...
                 sorted by length, cut again,     | holds the end of one epoch and the start of the next
                 order of batches shuffled

    the batch of a step, longest first:   r0 r1 r2 r3 | r4 r5 r6 r7        2 micro-batches, 2 ranks
    rank 0 computes                       r0       r3 | r4       r7
    rank 1 computes                          r1 r2    |    r5 r6

The batch of step s depends on (seed, s) alone: any number of ranks or micro-batches works through the same rows, and a
resumed run asks for the step where it stopped. Rows of similar length share a batch and, more so, a micro-batch, so
that padding costs less; the order of the lengths over the steps is random. Every epoch holds every row exactly once:
after ``steps_in(e)`` steps each row has been seen e times, and the rows that fill up the last batch belong to epoch
e + 1, which goes on from there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil

import numpy as np
import numpy.typing as npt
import torch

from nanopar_sft.chat import IGNORED, Example
from nanopar_sft.errors import InputError

Indices = npt.NDArray[np.int64]

_EPOCHS, _WINDOWS = 0, 1  # what a random generator is for, so that no two share their numbers


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """What one rank feeds through the model at once: rows padded on the right to the longest of them.

    Attributes:
        input_ids: [B, T] int64; padding is 0.
        labels: [B, T] int64; -100 where nothing is learned, padding too. Not shifted.
        attention_mask: [B, T] int64; 0 on padding, else the number of the example in its row, from 1.
        position_ids: [B, T] int64; from 0 in every example.
        sample_ids: [B, T] int64; an example's place in the stream of all training rows, different for each time it is
            seen: random numbers that are drawn by it are the same in every layout.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    attention_mask: torch.Tensor
    position_ids: torch.Tensor
    sample_ids: torch.Tensor


def collate(examples: Sequence[Example], sample_ids: Sequence[int] | Indices, packed: int = 0) -> MicroBatch:
    """One example a row, padded to the longest; or as many in a row as ``packed`` tokens take."""
    rows = pack([len(example.input_ids) for example in examples], packed)
    lengths = [sum(len(examples[number].input_ids) for number in row) for row in rows]
    arrays = [np.zeros((len(rows), max(lengths)), np.int64) for _ in range(5)]
    input_ids, labels, mask, positions, samples = arrays
    labels[:] = IGNORED
    for row, numbers in enumerate(rows):
        start = 0
        for document, number in enumerate(numbers, start=1):
            example, length = examples[number], len(examples[number].input_ids)
            place = slice(start, start + length)
            input_ids[row, place] = example.input_ids
            labels[row, place] = example.labels
            mask[row, place] = document
            positions[row, place] = np.arange(length)
            samples[row, place] = sample_ids[number]
            start += length
    return MicroBatch(*(torch.from_numpy(array) for array in arrays))


def pack(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Which examples share a row: each goes into the first row that has room for it, the longest first; 0: none do.

    >>> pack([5, 3, 2, 2], 7)
    [[0, 2], [1, 3]]
    """
    if not room:
        return [[number] for number in range(len(lengths))]
    rows: list[list[int]] = []
    free: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        row = next((row for row, left in enumerate(free) if left >= lengths[number]), len(rows))
        if row == len(rows):
            rows.append([])
            free.append(room)
        rows[row].append(number)
        free[row] -= lengths[number]
    return rows


class Batches:
    """The batches of a training run, by step (from 0)."""

    def __init__(self, examples: Sequence[Example], batch_size: int, *, seed: int, window: int = 4) -> None:
        """Hold the examples.

        Args:
            examples: at least one.
            batch_size: rows per optimizer step over all ranks and micro-batches.
            seed: shuffles the rows and the batches.
            window: batches that are sorted by length together; 1: every batch is a plain random draw. With more,
                padding falls, but a step teaches less: rows of one length are alike in other ways too. Micro-batches
                avoid padding without that cost, as each takes rows of one length out of its batch.
        """
        self.examples = examples
        self.batch_size = batch_size
        self._seed, self._batches_per_window = seed, window
        self._lengths = np.array([len(example.input_ids) for example in examples], np.int64)
        self._label_counts = np.array([example.label_count for example in examples], np.int64)
        # Neighbouring steps ask for the same epoch and window; the batch across two epochs needs two permutations.
        self._permutation = lru_cache(maxsize=2)(self._shuffled_rows)
        self._window = lru_cache(maxsize=2)(self._sorted_window)

    def steps_in(self, epochs: float) -> int:
        """The steps after which every row has been seen ``epochs`` times (rounded up to a whole batch)."""
        return ceil(round(epochs * len(self.examples)) / self.batch_size)

    def batch(self, step: int) -> list[Example]:
        """The rows of one step, longest first."""
        return [self.examples[row] for row in self._rows(self._places(step))]

    def label_count(self, step: int) -> int:
        """Tokens of the step's whole batch that the loss counts: what every rank divides its sum by."""
        return int(self._label_counts[self._rows(self._places(step))].sum())

    def local(self, step: int, rank: int, size: int, microbatches: int = 1, packed: int = 0) -> list[MicroBatch]:
        """The part of a step's batch that ``rank`` of ``size`` data-parallel ranks computes.

        Every micro-batch holds equally many examples, and at any time all ranks compute examples of similar length;
        with ``packed`` (tokens) several of a micro-batch share a row.

        Raises:
            InputError: ``batch_size`` is not divisible by size * microbatches.
        """
        check_divisible(self.batch_size, size, microbatches)
        places = self._places(step)
        rows = self._rows(places)
        parts = np.split(np.arange(self.batch_size), microbatches)
        return [
            collate([self.examples[row] for row in rows[part]], places[part], packed)
            for part in (_dealt(part, rank, size) for part in parts)
        ]

    def _places(self, step: int) -> Indices:
        """[batch_size] places in the stream, those of the longest rows first."""
        rows, size = len(self.examples), self.batch_size
        epoch = step * size // rows
        first, stop = -(-epoch * rows // size), (epoch + 1) * rows // size  # batches wholly inside this epoch
        if step >= stop:
            first, stop = step, step + 1  # this batch goes on into the next epoch
        window = self._batches_per_window
        first += (step - first) // window * window
        places: Indices = self._window(first, min(first + window, stop))[step - first]
        return places

    def _sorted_window(self, first: int, stop: int) -> Indices:
        """[stop - first, batch_size]: the places of steps ``first`` to ``stop`` - 1, made alike in length."""
        places = np.arange(first * self.batch_size, stop * self.batch_size)
        longest_first = np.argsort(-self._lengths[self._rows(places)], kind="stable")
        batches = places[longest_first].reshape(stop - first, self.batch_size)
        return np.random.default_rng([self._seed, _WINDOWS, first]).permutation(batches)

    def _rows(self, places: Indices) -> Indices:
        """The rows at some places of the stream."""
        epochs, offsets = np.divmod(places, len(self.examples))
        rows = np.empty_like(places)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            rows[here] = self._permutation(int(epoch))[offsets[here]]
        return rows

    def _shuffled_rows(self, epoch: int) -> Indices:
        return np.random.default_rng([self._seed, _EPOCHS, epoch]).permutation(len(self.examples))


def check_divisible(batch_size: int, ranks: int, microbatches: int) -> None:
    """Refuse a batch that cannot be cut into equal micro-batches.

    Raises:
        InputError: names the numbers and the nearest sizes that work.
    """
    parts = ranks * microbatches
    if batch_size % parts:
        below, above = batch_size // parts * parts, -(-batch_size // parts) * parts
        nearest = f"{below} or {above}" if below else f"{above}"
        raise InputError(
            f"batch_size {batch_size} cannot be divided by {ranks} data-parallel ranks x {microbatches} micro-batches; "
            f"use {nearest}"
        )


def _dealt(part: Indices, rank: int, size: int) -> Indices:
    """A rank's share of a micro-batch sorted by length: dealt out as 0 1 2 2 1 0 ..., so that shares weigh alike."""
    rounds = part.reshape(-1, size).copy()
    rounds[1::2] = rounds[1::2, ::-1]
    return rounds[:, rank]
