"""The loss against torch's cross_entropy, its counting rule and its memory; the balancing loss by hand."""

import pytest
import torch
from torch.nn import functional as F

import nanopar_models as models
from nanopar_models import loss as loss_module
from nanopar_models.loss import NextTokenLoss, cross_entropy, load_balancing_loss


@pytest.mark.parametrize("chunk_rows", [1, 3, 1000])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_equal_to_torch(dtype, chunk_rows, monkeypatch):
    monkeypatch.setattr(loss_module, "_CPU_CHUNK_BYTES", chunk_rows * 4 * 50)
    generator = torch.Generator().manual_seed(0)
    logits = (5 * torch.randn(17, 50, generator=generator)).to(dtype).requires_grad_()
    labels = torch.randint(0, 50, (17,), generator=generator)
    labels[[2, 9]] = -100
    weight = torch.rand(17, generator=generator, dtype=torch.promote_types(dtype, torch.float32))
    wide = logits.detach().to(weight.dtype).requires_grad_()
    want = F.cross_entropy(wide, labels, reduction="none")
    (want * weight).sum().backward()
    got = cross_entropy(logits, labels)
    (got * weight).sum().backward()
    assert got.dtype == weight.dtype and logits.grad.dtype == dtype
    tight = 1e-13 if dtype == torch.float64 else 3e-6
    torch.testing.assert_close(got, want, atol=tight, rtol=0)
    torch.testing.assert_close(
        logits.grad.to(wide.dtype), wide.grad, atol=4e-3 if dtype == torch.bfloat16 else tight, rtol=0
    )


def test_extreme_logits_stay_finite():
    logits = torch.tensor([[1e4, -1e4, 0.0]], requires_grad=True)
    loss = cross_entropy(logits, torch.tensor([1]))
    loss.backward(torch.ones_like(loss))
    assert loss.item() == 2e4 and logits.grad.tolist() == [[1.0, -1.0, 0.0]]


def test_label_outside_the_vocabulary():
    with pytest.raises((IndexError, RuntimeError)):
        cross_entropy(torch.zeros(1, 4), torch.tensor([-1]))


def test_what_is_counted():
    labels = torch.tensor([[5, 6, 7, 8], [5, 6, 7, 8], [5, -100, 7, 8]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0], [1, 1, 1, 1]])
    assert models.next_token_labels(labels).tolist() == [[6, 7, 8, -100], [6, 7, 8, -100], [-100, 7, 8, -100]]
    assert models.next_token_labels(labels, mask).tolist() == [
        [-100, -100, 8, -100],  # left padding: the step from padding to the first token is not counted
        [6, 7, -100, -100],
        [-100, 7, 8, -100],
    ]


def test_divisor_over_several_batches():
    """Shares of a step add up to the mean over the whole step, however unevenly its tokens are spread."""
    logits = torch.randn(4, 6, 11, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    labels = torch.randint(0, 11, (4, 6), generator=torch.Generator().manual_seed(1))
    labels[0, 1:] = -100
    labels[3] = -100  # no counted token at all in the last part
    want = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    count = (labels != -100).sum()
    loss = NextTokenLoss()
    for items in (count, count.item()):
        parts = [loss(logits[i : i + 1], labels[i : i + 1], items) for i in range(4)]
        torch.testing.assert_close(sum(parts), want, atol=1e-14, rtol=0)
        assert parts[3].item() == 0
    assert loss(logits[3:], labels[3:]).item() == 0
    assert loss(logits[3:], labels[3:], torch.tensor(0)).item() == 0 == loss(logits[3:], labels[3:], 0).item()


def test_forward_keeps_no_second_copy_of_the_logits():
    saved = []

    def pack(tensor):
        saved.append(tensor)
        return tensor

    logits = torch.randn(64, 1000, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        cross_entropy(logits, torch.zeros(64, dtype=torch.long))
    assert sum(t.nbytes for t in saved if t.data_ptr() != logits.data_ptr()) < 2000


def test_balancing_loss_by_hand():
    # Two tokens, three experts: choices {0, 1} and {0, 2}; shares (2, 1, 1) / 2, probabilities averaged.
    logits = torch.tensor([[2.0, 1.0, 0.0], [2.0, 0.0, 1.0]])
    p = logits.softmax(1).mean(0)
    want = 3 * (1.0 * p[0] + 0.5 * p[1] + 0.5 * p[2])
    torch.testing.assert_close(load_balancing_loss([logits]), want)
    torch.testing.assert_close(load_balancing_loss([logits[:1], logits[1:]]), want)  # layers are pooled
    assert load_balancing_loss([torch.zeros(0, 3)]).item() == 0
