"""Parameters that are whole inside a block: read, used, written by the first rank, whatever happens inside."""

from typing import Any

import pytest
import torch
from tests.zero.layouts import STAGES, Layout, Net, adamw, batch, make, plainly, rank, sgd, train, world
from torch import Tensor, nn

import nanopar_core as core
import nanopar_zero as zero
from nanopar_core.testing import assert_parity, run

LAYOUTS = [*(Layout(stage) for stage in STAGES), Layout(1, replicas=2), Layout(3, replicas=2)]


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def absent(model: nn.Module) -> list[str]:
    """The trained parameters that read as NaN."""
    return [name for name, p in model.named_parameters() if p.requires_grad and p.numel() and p.isnan().all()]


# ------------------------------------------------------------------------------------------------------ to be read


def read(layouts: list[Layout]) -> list[dict[str, Any]]:
    results = []
    for layout in layouts:
        model, optimizer = make(layout, seed=rank())
        train(model, optimizer, range(1))
        outside = absent(model)
        assert len(outside) == (11 if layout.stage == 3 else 0)
        with zero.gathered(model):
            result = {"whole": weights_of(model), "output": model(batch(0)[0]).detach()}
            assert not absent(model), "a forward inside frees nothing"
            with zero.gathered(model, "layers.0.*"), zero.gathered(model.layers[1]):
                pass
            assert not absent(model), "the outer block still holds"
        assert absent(model) == outside
        with zero.gathered(model, ["layers.0.down.weight", "head*"]):
            assert "layers.0.down.weight" not in absent(model)
            if layout.stage == 3:
                assert {name.split(".")[0] for name in absent(model)} == {"layers"}
                assert all(name.startswith("layers.1.") for name in absent(model))
        with zero.gathered(nn.ModuleDict({"inner": model}), "inner.lower.weight"):
            assert not model.lower.weight.isnan().any()
        assert absent(model) == outside
        x, y = batch(1)
        loss = (model(x) - y).square().sum()
        with zero.gathered(model):  # between forward and backward
            result["again"] = weights_of(model)
        loss.backward()
        optimizer.zero_grad()
        result["trained"] = train(model, optimizer, range(1, 3))
        assert absent(model) == outside
        results.append(result)
    return results


@pytest.mark.parametrize("ranks", [2, 4])
def test_parameters_are_whole_inside_and_training_goes_on(ranks: int) -> None:
    results = run(ranks, read, LAYOUTS)
    whole, expected = {"weights": plainly(1)["weights"]}, plainly(3)
    plain = Net().double()
    plain.load_state_dict(whole["weights"])
    names = dict(plain.named_parameters())
    whole = {
        "weights": {name: p.detach() for name, p in names.items()},
        "outputs": {"all": plain(batch(0)[0]).detach()},
    }
    for number in range(len(LAYOUTS)):
        inside = [{"weights": r[number]["whole"], "outputs": {"all": r[number]["output"]}} for r in results]
        assert_parity(whole, inside)
        assert_parity({"weights": whole["weights"]}, [{"weights": r[number]["again"]} for r in results])
        trained = [r[number]["trained"] for r in results]
        assert_parity({"weights": expected["weights"]}, [{"weights": each["weights"]} for each in trained])


def what_is_sent() -> list[dict[str, int]]:
    counts = []
    for stage in STAGES:
        model, optimizer = make(Layout(stage))
        optimizer.wait()
        with core.ledger() as book, zero.gathered(model):
            pass
        counts.append({label: sum(r.label == label for r in book.records) for label in ("parameters", "written?")})
        assert len(book.records) == sum(counts[-1].values())
        assert counts[-1]["parameters"] == (len(optimizer.windows.buckets) if stage == 3 else 0)
    return counts


def test_what_is_only_read_costs_a_gather_and_a_few_bytes() -> None:
    for counts in run(2, what_is_sent):
        assert all(0 < count["written?"] <= 2 for count in counts)


# --------------------------------------------------------------------------------------------------- to be written


def write(model: Net, how: str) -> None:
    first = rank() == 0
    if how == "in place":
        if first:
            model.lower.weight.mul_(2)
            model.layers[0].scale.fill_(5)
    elif how == "data":
        if first:
            model.lower.weight.data = 2 * model.lower.weight
            model.layers[0].scale.data = torch.full((), 5, dtype=model.layers[0].scale.dtype)
    elif how == "by all, the first counts":
        model.lower.weight.mul_(2 + rank())
        model.layers[0].scale.fill_(5 + rank())
        if not first:
            model.head.weight.zero_()
    elif how == "frozen":
        if first:
            model.head.bias.fill_(3)  # frozen: in a bucket of stage 3 only
            model.places.add_(1)  # not even of floating point
    elif not first:
        model.lower.weight.zero_()  # "by others alone": lost
        model.head.bias.zero_()


def written(layouts: list[Layout], how: str) -> list[dict[str, Any]]:
    results = []
    for layout in layouts:
        model, optimizer = make(layout, seed=rank())
        optimizer.zero_grad()
        with torch.no_grad(), zero.gathered(model, None if how != "data" else ["lower.*", "layers.0.*"]):
            write(model, how)
        inside = weights_of(model) if layout.stage != 3 else None
        with zero.gathered(model):
            again = weights_of(model)
        assert inside is None or all(torch.equal(inside[name], value) for name, value in again.items())
        results.append({"at once": again, **train(model, optimizer, range(1))})
    return results


@pytest.mark.parametrize("how", ["in place", "data", "by all, the first counts", "frozen", "by others alone"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_what_the_first_rank_writes_is_what_all_train_on(how: str, ranks: int) -> None:
    torch.manual_seed(0)
    plain = Net().double()
    optimizer = adamw([p for p in plain.parameters() if p.requires_grad])
    decay = {name: p for name, p in plain.named_parameters() if p.requires_grad and name.endswith(("weight", "empty"))}
    rest = [p for name, p in plain.named_parameters() if p.requires_grad and name not in decay]
    optimizer = adamw([{"params": list(decay.values())}, {"params": rest, "weight_decay": 0.0}])
    with torch.no_grad():
        if how == "frozen":
            plain.head.bias.fill_(3)
            plain.places.add_(1)
        elif how != "by others alone":
            plain.lower.weight.mul_(2)
            plain.layers[0].scale.fill_(5)
    at_once = {name: p.detach().clone() for name, p in plain.named_parameters()}
    x, y = batch(0)
    loss = (plain(x) - y).square().sum() / y.numel()
    loss.backward()
    optimizer.step()
    expected = {"loss": [loss.item()], "weights": plain.state_dict(), "at once": at_once}
    layouts = LAYOUTS if ranks == 4 else LAYOUTS[:4]
    results = run(ranks, written, layouts, how)
    for number in range(len(layouts)):
        assert_parity(expected, [result[number] for result in results])


def rounded_only_where_written() -> list[dict[str, Tensor]]:
    results = []
    for stage in STAGES:
        model, optimizer = make(Layout(stage, bf16=True))
        with torch.no_grad(), zero.gathered(model):
            if rank() == 0:
                model.layers[0].up.bias.mul_(1.0)
            else:
                model.layers[0].down.weight.mul_(1.0)
        results.append(zero.full_state_dict(model, optimizer))
    return results


def test_only_the_masters_of_written_weights_are_rounded() -> None:
    results, others = run(2, rounded_only_where_written)
    assert others == [{}] * 4
    torch.manual_seed(0)
    expected = Net().state_dict()
    for name in ("layers.0.up.bias", "layers.1.up.weight", "head.bias"):  # written, or frozen without masters
        expected[name] = expected[name].bfloat16().to(expected[name].dtype)
    for full in results:
        for name, value in expected.items():
            assert torch.equal(full[name].to(value.dtype), value), name


# ------------------------------------------------------------------------------------------------------- exceptions


def fails_inside(layouts: list[Layout]) -> list[dict[str, Any]]:
    results = []
    for layout in layouts:
        model, optimizer = make(layout, seed=rank())
        inside = zero.gathered(model), zero.gathered(model, "layers.*")
        with pytest.raises(ZeroDivisionError), torch.no_grad(), inside[0], inside[1]:
            model.lower.weight.mul_(2 + rank())
            raise ZeroDivisionError
        with torch.no_grad(), zero.gathered(model):
            if rank() == 0:
                model.lower.weight.div_(2)
        assert bool(absent(model)) == (layout.stage == 3)
        results.append(train(model, optimizer, range(2)))
    return results


def test_an_exception_inside_leaves_all_ranks_alike() -> None:
    results = run(2, fails_inside, LAYOUTS[:4])
    expected = {"weights": plainly(2)["weights"]}
    for number in range(4):
        assert_parity(expected, [{"weights": result[number]["weights"]} for result in results])


def test_what_cannot_be_gathered_says_so() -> None:
    plain = Net()
    with pytest.raises(ValueError, match="no ZeroOptimizer has this Net in hands"), zero.gathered(plain):
        pass
    for stage in STAGES:
        model, optimizer = make(Layout(stage))
        with pytest.raises(ValueError, match="'nothing' matches no parameter of the Net"):
            zero.gathered(model, "nothing").__enter__()
        with pytest.raises(ValueError, match="no ZeroOptimizer has this Linear in hands"):
            zero.gathered(nn.Linear(1, 1)).__enter__()
        with zero.gathered(model.layers[0].up, "bias"):
            assert "layers.0.up.bias" not in absent(model)
        with zero.gathered(model):
            optimizer.close()
        assert not absent(model)
        with pytest.raises(ValueError, match="no ZeroOptimizer"):
            zero.gathered(model).__enter__()


def two_engines() -> list[float]:
    """A module above two models that are trained by an optimizer each."""
    both = nn.ModuleDict({"one": nn.Linear(4, 4), "two": nn.Linear(4, 4)})
    axis = core.Mesh(dp=world()).dp
    optimizers = [zero.shard(both[name], sgd, axis=axis, stage=stage) for name, stage in (("one", 3), ("two", 1))]
    with torch.no_grad(), zero.gathered(both):
        for parameter in both.parameters():
            parameter.fill_(1.0 + rank())
    for optimizer in optimizers:
        optimizer.close()
    return [parameter.sum().item() for parameter in both.parameters()]


def test_a_module_above_several_models() -> None:
    assert run(2, two_engines) == [[16.0, 4.0, 16.0, 4.0]] * 2
