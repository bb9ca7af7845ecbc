"""Sparsemixer: values by hand, its gradient, and the noise it draws from."""

import pytest
import torch

import nanopar_models as models
from nanopar_models.noise import TokenKeys
from nanopar_models.router import sparsemixer


def test_alone_outside_the_gap_together_inside():
    # A relative gap of 0.021 is beyond 2 x 0.01, one of 0.019 is not. With a best score of 2 the latter is 0.038 in the
    # logits, and 1 / (1 + exp(-0.038)) = 0.5095.
    weights, indices = sparsemixer(torch.tensor([[0.979 * 2, 2.0, 0.3], [0.981 * 2, 2.0, 0.3]]), 0.01)
    torch.testing.assert_close(weights, torch.tensor([[1.0, 1.0], [0.5095, 1.0]]), atol=5e-5, rtol=0)
    assert indices.tolist() == [[1, 0], [1, 0]]


def test_three_in_a_near_tie():
    scores = torch.tensor([[1.0, 0.99, 0.985, -3.0]], dtype=torch.float64)
    weights, indices = sparsemixer(scores, 0.01)
    first = 1 / (1 + torch.tensor([-0.01, -0.015], dtype=torch.float64).exp().sum())
    second = 1 / (1 + torch.tensor(-0.005, dtype=torch.float64).exp())
    torch.testing.assert_close(weights[0], torch.stack((first, second)), atol=1e-14, rtol=0)
    assert indices.tolist() == [[0, 1]]


def test_negative_scores_are_compared_by_their_own_size():
    # Best -1.0, rival -1.015: gap 0.015 / 1.015 = 0.0148 < 0.02; rival -1.03: gap 0.03 / 1.03 = 0.029 > 0.02.
    weights, _ = sparsemixer(torch.tensor([[-1.0, -1.015, -9.0], [-1.0, -1.03, -9.0]]), 0.01)
    torch.testing.assert_close(weights[:, 0], torch.tensor([0.50375, 1.0]), atol=1e-5, rtol=0)


def test_without_noise_all_weights_are_one():
    scores = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    weights, indices = sparsemixer(scores, 0.0)
    assert (weights == 1).all()
    assert torch.equal(indices, scores.topk(2, 1)[1])


def test_gradient_is_the_softmaxs_own():
    generator = torch.Generator().manual_seed(0)
    scores = 3 + 0.05 * torch.randn(6, 5, generator=generator, dtype=torch.float64)
    scores.requires_grad_()
    assert torch.autograd.gradcheck(lambda s: sparsemixer(s, 0.01)[0], scores, eps=1e-7, atol=1e-5)
    sparsemixer(scores, 0.01)[0].sum().backward()
    assert scores.grad.abs().max() > 0.01


def test_lone_winners_get_no_gradient():
    scores = torch.tensor([[5.0, 1.0, -2.0]], requires_grad=True)
    sparsemixer(scores, 0.01)[0].sum().backward()
    assert scores.grad.abs().max() == 0


def keys(samples: list[int], positions: list[int], layer: int = 1) -> TokenKeys:
    return TokenKeys(layer, torch.tensor(samples), torch.tensor(positions))


def test_counter_noise_is_uniform_and_exponential():
    noise = models.CounterNoise(seed=3)
    where = keys([5] * 4000, list(range(4000)))
    scores = torch.zeros(4000, 8)
    uniform = noise.uniform(scores, 0, where)
    assert uniform.shape == (4000, 1) and uniform.min() >= 0 and uniform.max() < 1
    assert abs(uniform.mean() - 0.5) < 0.02 and abs(uniform.var() - 1 / 12) < 0.005
    exponential = noise.exponential(scores, 0, where)
    assert abs(exponential.mean() - 1) < 0.02 and abs(exponential.var() - 1) < 0.06 and exponential.min() > 0
    correlation = torch.corrcoef(exponential.t()) - torch.eye(8)
    assert correlation.abs().max() < 0.08  # columns are independent
    ones = torch.ones(4000, 8)
    factors = noise.jitter(ones, 0.01, where)
    assert factors.min() >= 0.99 and factors.max() < 1.01 and abs(factors.mean() - 1) < 2e-4


def test_counter_noise_depends_on_every_key_and_on_nothing_else():
    scores = torch.zeros(2, 8)
    base = models.CounterNoise(0).exponential(scores, 0, keys([1, 2], [3, 4]))
    for other in (
        models.CounterNoise(1).exponential(scores, 0, keys([1, 2], [3, 4])),
        models.CounterNoise(0).exponential(scores, 1, keys([1, 2], [3, 4])),
        models.CounterNoise(0).exponential(scores, 0, keys([1, 2], [3, 4], layer=2)),
        models.CounterNoise(0).exponential(scores, 0, keys([3, 4], [3, 4])),
        models.CounterNoise(0).exponential(scores, 0, keys([1, 2], [5, 6])),
    ):
        assert (other != base).all()
    assert torch.equal(models.CounterNoise(0).exponential(scores, 0, keys([2, 1], [4, 3])), base.flip(0))


def test_counter_noise_is_splitmix64():
    # First output of SplitMix64 seeded with 0 is 0xE220A8397B1DCDAF (Vigna's reference implementation).
    from nanopar_models.noise import _mix, _mix_int

    assert _mix(torch.tensor([0])).item() % 2**64 == 0xE220A8397B1DCDAF
    assert _mix_int(0) % 2**64 == 0xE220A8397B1DCDAF


@pytest.fixture
def noisy(make_pair):
    model = make_pair(router_noise=True).ours
    model.set_noise(models.CounterNoise(7))
    return model.double().train()


def test_stochastic_model_is_independent_of_how_the_batch_is_cut(noisy):
    ids = torch.randint(3, 320, (4, 16), generator=torch.Generator().manual_seed(0))
    samples = torch.tensor([40, 41, 42, 43])
    with torch.no_grad():
        whole = noisy(ids, sample_ids=samples).logits
        halves = torch.cat([noisy(ids[i : i + 2], sample_ids=samples[i : i + 2]).logits for i in (0, 2)])
        torch.testing.assert_close(halves, whole, atol=1e-12, rtol=0)
        # Left padding moves tokens about in the batch but not in their sequence.
        padded = torch.cat((torch.zeros(4, 3, dtype=torch.long), ids), 1)
        mask = (torch.arange(19) >= 3).long().expand(4, -1)
        positions = (torch.arange(19) - 3).clamp(min=0)[None]
        moved = noisy(padded, position_ids=positions, attention_mask=mask, sample_ids=samples).logits[:, 3:]
        torch.testing.assert_close(moved, whole, atol=1e-12, rtol=0)
        other = noisy(ids, sample_ids=samples + 100).logits
    assert (other - whole).abs().max() > 0.1


def test_stochastic_model_needs_sample_ids(noisy):
    ids = torch.randint(3, 320, (2, 8))
    with pytest.raises(ValueError, match="router_noise needs sample_ids"):
        noisy(ids)
    noisy.eval()
    assert noisy(ids).logits.isfinite().all()  # evaluation mode draws nothing
