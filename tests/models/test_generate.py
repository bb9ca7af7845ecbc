"""Generation: token for token what transformers generates, and the sampling rules."""

import pytest
import torch
from torch import Tensor

import nanopar_models as models
from nanopar_models.generation import choose_token


def prompts(side_padding: bool) -> tuple[Tensor, Tensor]:
    ids = torch.randint(3, 320, (3, 12), generator=torch.Generator().manual_seed(4))
    mask = torch.ones_like(ids)
    if side_padding:
        mask[1, :5] = 0
        mask[2, :9] = 0
    return torch.where(mask == 1, ids, 0), mask


def reference_generate(reference, ids: Tensor, mask: Tensor, stop_ids: list[int], new: int) -> Tensor:
    return reference.generate(
        ids, attention_mask=mask, max_new_tokens=new, do_sample=False, eos_token_id=stop_ids or None, pad_token_id=0
    )[:, ids.shape[1] :]


@pytest.mark.parametrize("side_padding", [False, True])
def test_greedy_equals_transformers(make_pair, side_padding):
    pair = make_pair()
    ids, mask = prompts(side_padding)
    # Stop ids out of what the model really says, so that rows end at different steps.
    free = reference_generate(pair.reference, ids, mask, [], 30)
    stop_ids = [free[0, 6].item(), free[1, 17].item(), 319]
    want = reference_generate(pair.reference, ids, mask, stop_ids, 30)
    assert (want == 0).any() and len({(row != 0).sum().item() for row in want}) > 1
    got = models.generate(pair.ours, ids, attention_mask=mask, max_new_tokens=30, stop_ids=stop_ids, pad_id=0)
    assert torch.equal(got, want)
    assert torch.equal(models.generate(pair.ours, ids, attention_mask=mask, max_new_tokens=30), free)


def test_greedy_with_a_sliding_window(make_pair):
    pair = make_pair(sliding_window=8)
    ids, mask = prompts(True)
    want = reference_generate(pair.reference, ids, mask, [], 20)
    assert torch.equal(models.generate(pair.ours, ids, attention_mask=mask, max_new_tokens=20), want)


def test_greedy_across_longropes_switch(make_pair):
    scaling = {
        "type": "longrope",
        "short_factor": [1.0 + 0.05 * i for i in range(8)],
        "long_factor": [1.0 + 0.8 * i for i in range(8)],
        "short_mscale": 1.1,
        "long_mscale": 1.6,
        "original_max_position_embeddings": 20,
    }
    pair = make_pair(rope_scaling=scaling, original_max_position_embeddings=20)
    ids, mask = prompts(False)
    want = reference_generate(pair.reference, ids, mask, [], 20)
    assert torch.equal(models.generate(pair.ours, ids, max_new_tokens=20), want)


def test_cache_equals_recomputing_everything(make_pair):
    ours = make_pair().ours
    ids, mask = prompts(True)
    got = models.generate(ours, ids, attention_mask=mask, max_new_tokens=10)
    for row in range(3):
        sequence = ids[row : row + 1, mask[row] == 1]
        for step in range(10):
            with torch.no_grad():
                chosen = ours(sequence).logits[:, -1].argmax(1)
            assert chosen.item() == got[row, step].item()
            sequence = torch.cat((sequence, chosen[:, None]), 1)


def test_stops_when_all_rows_have(make_pair):
    pair = make_pair()
    ids, _ = prompts(False)
    first = models.generate(pair.ours, ids, max_new_tokens=1)
    seen = []
    got = models.generate(
        pair.ours, ids, max_new_tokens=50, stop_ids=first.flatten().tolist(), pad_id=7, on_token=seen.append
    )
    assert torch.equal(got, first)
    assert len(seen) == 1 and torch.equal(seen[0], first[:, 0])


def test_finished_rows_visit_no_expert(make_pair):
    ours = make_pair().ours
    ids, _ = prompts(False)
    stop = models.generate(ours, ids, max_new_tokens=1)[0].tolist()  # ends row 0 at once
    seen = []
    ours.model.layers[0].mlp.experts.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[0]))
    got = models.generate(ours, ids, max_new_tokens=4, stop_ids=stop, pad_id=0)
    assert got[0].tolist() == [stop[0], 0, 0, 0] and stop[0] not in got[1:]
    assert seen == [36, 2, 2, 2]


def test_modes_and_gradients_are_left_alone(make_pair):
    ours = make_pair(router_noise=True).ours
    ours.train()
    ours.model.layers[1].eval()
    modes = [module.training for module in ours.modules()]
    got = models.generate(ours, prompts(False)[0], max_new_tokens=3)
    assert [module.training for module in ours.modules()] == modes
    assert not got.requires_grad and torch.is_grad_enabled()


def test_sampling_follows_its_probabilities():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]])).expand(20_000, -1)

    def frequencies(**options) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        settings = {"temperature": 1.0, "top_k": None, "top_p": None, **options}
        chosen = choose_token(logits, **settings, generator=generator)
        return torch.bincount(chosen, minlength=4) / 20_000

    def close(got: Tensor, want: list[float]) -> bool:
        return bool((got - torch.tensor(want)).abs().max() < 0.015)

    assert close(frequencies(), [0.5, 0.3, 0.15, 0.05])
    squares = torch.tensor([0.5, 0.3, 0.15, 0.05]) ** 2
    assert close(frequencies(temperature=0.5), (squares / squares.sum()).tolist())
    assert close(frequencies(top_k=2), [0.625, 0.375, 0, 0])
    assert close(frequencies(top_p=0.79), [0.625, 0.375, 0, 0])
    assert close(frequencies(top_p=0.81), [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0])
    assert close(frequencies(top_p=0.01), [1, 0, 0, 0])
    assert close(frequencies(top_k=9, top_p=1.0), [0.5, 0.3, 0.15, 0.05])


def test_sampling_repeats_with_its_generator(make_pair):
    ours = make_pair().ours
    ids, _ = prompts(False)
    runs = [
        models.generate(ours, ids, max_new_tokens=12, temperature=1.0, generator=torch.Generator().manual_seed(seed))
        for seed in (0, 0, 1)
    ]
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ({"temperature": -1.0}, "temperature must not be negative"),
        ({"top_k": 0}, "top_k must be None or at least 1"),
        ({"top_p": 0.0}, "top_p must be None or in"),
        ({"attention_mask": torch.ones(3, 5)}, r"attention_mask must be \[3, 12\]"),
        ({"attention_mask": torch.arange(12).expand(3, -1) < 10}, "padding on the left"),
    ],
)
def test_bad_arguments(make_pair, change, message):
    with pytest.raises(ValueError, match=message):
        models.generate(make_pair().ours, prompts(False)[0], **{"max_new_tokens": 3, **change})
