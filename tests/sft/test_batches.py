from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanopar_sft.batches import Batches, check_divisible, collate
from nanopar_sft.chat import Chat, Example
from nanopar_sft.errors import InputError
from nanopar_sft.rows import load_rows
from nanopar_sft.tokenizer import load_tokenizer

SHARED = Path(__file__).parents[2].parent / "shared" / "data"


def example(row: int, length: int, learned: int) -> Example:
    """A row whose tokens all carry its number, of which the last ``learned`` are labels."""
    ids = np.full(length, row, np.int32)
    labels = ids.copy()
    labels[: length - learned] = -100
    return Example(ids, labels)


def examples(count: int, seed: int = 0) -> list[Example]:
    """Rows of 5 to 60 tokens, of which 1 to 4 are learned."""
    rng = np.random.default_rng(seed)
    return [example(row, int(rng.integers(5, 61)), int(rng.integers(1, 5))) for row in range(count)]


def rows_of(batch: list[Example]) -> list[int]:
    return [int(found.input_ids[0]) for found in batch]


@settings(deadline=None)  # the machine may be busy
@given(
    count=st.integers(1, 300), batch_size=st.integers(1, 40), seed=st.integers(0, 3), window=st.sampled_from([1, 4, 7])
)
def test_every_row_exactly_once_per_epoch(count: int, batch_size: int, seed: int, window: int) -> None:
    batches = Batches(examples(count), batch_size, seed=seed, window=window)
    seen: Counter[int] = Counter()
    step = 0
    for epoch in (1, 2, 3):
        while step < batches.steps_in(epoch):
            seen.update(rows_of(batches.batch(step)))
            step += 1
        # The last batch is filled up with the first rows of the next epoch, and with nothing else.
        filled = step * batch_size - epoch * count
        assert 0 <= filled < batch_size
        assert seen.total() == epoch * count + filled
        assert all(times >= epoch for times in (seen[row] for row in range(count)))


@settings(deadline=None)  # the machine may be busy
@given(
    count=st.integers(1, 200),
    ranks=st.integers(1, 5),
    microbatches=st.integers(1, 4),
    rows=st.integers(1, 4),
    step=st.integers(0, 30),
)
def test_ranks_and_microbatches_share_out_the_same_batch(
    count: int, ranks: int, microbatches: int, rows: int, step: int
) -> None:
    batches = Batches(examples(count), ranks * microbatches * rows, seed=5)
    parts = [batches.local(step, rank, ranks, microbatches) for rank in range(ranks)]
    assert all(len(part) == microbatches for part in parts)
    flat = [micro for part in parts for micro in part]
    assert all(len(micro.input_ids) == rows for micro in flat)
    dealt = [int(row[0]) for micro in flat for row in micro.input_ids]
    assert Counter(dealt) == Counter(rows_of(batches.batch(step)))
    # What the ranks count together, after the causal shift, is the count they divide by.
    counted = sum(int((micro.labels[:, 1:] != -100).sum()) for micro in flat)
    assert counted == batches.label_count(step)
    places = sorted(int(place) for micro in flat for place in micro.sample_ids.amax(1))
    assert len(set(places)) == len(places)


def test_sample_ids_do_not_depend_on_the_layout_and_never_repeat() -> None:
    def ids_by_row(ranks: int, microbatches: int) -> dict[int, int]:
        parts = [batches.local(3, rank, ranks, microbatches) for rank in range(ranks)]
        return {
            int(row[0]): int(place)
            for part in parts
            for micro in part
            for row, place in zip(micro.input_ids, micro.sample_ids.amax(1), strict=True)
        }

    batches = Batches(examples(500), 24, seed=0)
    assert ids_by_row(1, 1) == ids_by_row(2, 3) == ids_by_row(4, 2)
    everything = torch.cat([batches.local(step, 0, 1)[0].sample_ids.amax(1) for step in range(batches.steps_in(2))])
    assert sorted(everything.tolist()) == list(range(len(everything)))


def test_a_step_depends_on_the_seed_and_its_number_alone() -> None:
    walked, fresh = Batches(examples(320), 16, seed=0), Batches(examples(320), 16, seed=0)
    everything = [rows_of(walked.batch(step)) for step in range(60)]
    for step in (59, 3, 41, 18):
        assert rows_of(fresh.batch(step)) == everything[step]
    other = Batches(examples(320), 16, seed=1)
    assert rows_of(other.batch(0)) != everything[0]
    first, second = ({frozenset(rows) for rows in everything[epoch : epoch + 20]} for epoch in (0, 20))
    assert not first & second  # epochs are shuffled anew


def test_lengths_come_in_random_order() -> None:
    batches = Batches(examples(3200), 32, seed=0, window=4)
    means = np.array([np.mean([len(row.input_ids) for row in batches.batch(step)]) for step in range(100)])
    windows = means.reshape(25, 4)
    assert (np.ptp(windows, axis=1) > 30).all()  # rows of 5 to 60 tokens: batches do differ in length
    assert set(windows.argmax(1)) == set(windows.argmin(1)) == {0, 1, 2, 3}


def test_a_window_of_one_batch_leaves_the_random_draw_alone() -> None:
    """Batches of all lengths: their mean lengths differ as those of random draws do."""
    batches = Batches(examples(3200), 32, seed=0, window=1)
    lengths = np.array([[len(row.input_ids) for row in batches.batch(step)] for step in range(100)])
    assert lengths.mean(1).std() == pytest.approx(lengths.std() / 32**0.5, rel=0.3)


def test_padding_of_a_hand_made_batch() -> None:
    micro = collate([example(7, 3, 1), example(9, 5, 2)], [40, 41])
    assert micro.input_ids.tolist() == [[7, 7, 7, 0, 0], [9, 9, 9, 9, 9]]
    assert micro.labels.tolist() == [[-100, -100, 7, -100, -100], [-100, -100, -100, 9, 9]]
    assert micro.attention_mask.tolist() == [[True, True, True, False, False], [True] * 5]
    assert micro.sample_ids.tolist() == [[40] * 3 + [0] * 2, [41] * 5]
    assert {micro.input_ids.dtype, micro.labels.dtype, micro.sample_ids.dtype} == {torch.int64}


def test_rows_are_dealt_out_by_length() -> None:
    """The picture of the module's docstring: eight rows, longest first, over two ranks and two micro-batches."""
    batches = Batches([example(row, 20 - row, 1) for row in range(8)], 8, seed=0)
    parts = [[[int(row[0]) for row in micro.input_ids] for micro in batches.local(0, rank, 2, 2)] for rank in range(2)]
    assert parts == [[[0, 3], [4, 7]], [[1, 2], [5, 6]]]


def test_label_count_by_hand() -> None:
    batches = Batches([example(1, 9, 2), example(2, 9, 3), example(3, 9, 4)], 3, seed=0)
    assert batches.label_count(0) == 9


def test_a_label_on_the_first_token_is_not_counted() -> None:
    assert example(1, 4, 4).label_count == 3


@pytest.mark.parametrize(
    ("batch_size", "ranks", "microbatches", "message"),
    [
        (64, 3, 1, "batch_size 64 cannot be divided by 3 data-parallel ranks x 1 micro-batches; use 63 or 66"),
        (6, 2, 4, "batch_size 6 cannot be divided by 2 data-parallel ranks x 4 micro-batches; use 8"),
    ],
)
def test_a_batch_that_cannot_be_divided(batch_size: int, ranks: int, microbatches: int, message: str) -> None:
    with pytest.raises(InputError) as caught:
        check_divisible(batch_size, ranks, microbatches)
    assert str(caught.value) == message
    with pytest.raises(InputError):
        Batches(examples(9), batch_size, seed=0).local(0, 0, ranks, microbatches)


def test_steps_in_epochs() -> None:
    batches = Batches(examples(100), 32, seed=0)
    assert [batches.steps_in(epochs) for epochs in (0.5, 1, 2, 8)] == [2, 4, 7, 25]


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs ../shared/data")
def test_little_padding_and_equal_loads_on_gsm8k() -> None:
    chat = Chat(load_tokenizer(str(SHARED / "phi3_tokenizer")))
    rows = load_rows(str(SHARED / "gsm8k" / "train.jsonl"), count=4096)
    found = chat.encode(rows, 512).examples
    batches = Batches(found, 64, seed=0)
    padding, padded, real = 0, [0, 0], [0, 0]
    for step in range(batches.steps_in(1)):
        for rank in range(2):
            [micro] = batches.local(step, rank, 2)
            padding += int((micro.attention_mask == 0).sum())
            padded[rank] += micro.input_ids.numel()
            real[rank] += int((micro.attention_mask > 0).sum())
    unsorted = [collate(found[first : first + 32], range(32)).attention_mask for first in range(0, len(found), 32)]
    waste_unsorted = float(np.mean([1 - float(mask.double().mean()) for mask in unsorted]))
    assert padding / sum(padded) < waste_unsorted / 2
    assert max(real) / min(real) < 1.01
    assert max(padded) / min(padded) < 1.06  # rank 0 has the longest row of every batch
