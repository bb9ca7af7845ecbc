"""Whole weights under the model's own names: in memory, in state dicts, and in checkpoints for any other layout."""

import copy
import io
import os
import signal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.zero.layouts import (
    DECAY,
    ROWS,
    STAGES,
    Layout,
    Net,
    adamw,
    batch,
    loss_of,
    make,
    named_groups,
    plainly,
    rank,
    sgd,
    train,
    world,
)
from tests.zero.memory import peak_bytes
from torch import Tensor, nn

import nanopar_core as core
import nanopar_zero as zero
from nanopar_core import checkpoint
from nanopar_core.testing import assert_parity, run

pytestmark = pytest.mark.long

needs_safetensors = pytest.mark.skipif(find_spec("safetensors") is None, reason="save and load need safetensors")

STEPS = 5


# ------------------------------------------------------------------------------------------------------ in memory


def state_dicts(layouts: list[Layout]) -> list[dict[str, Any]]:
    """Of each layout after two steps: the full state dict, and state dicts taken in many ways."""
    results = []
    for layout in layouts:
        model, optimizer = make(layout, seed=rank())
        train(model, optimizer, range(2))
        whole = nn.ModuleDict({"inner": model}).state_dict()
        result: dict[str, Any] = {
            "full": zero.full_state_dict(model, optimizer),
            "model": {name: value.clone() for name, value in model.state_dict().items()},
            "parent": {name.removeprefix("inner."): value for name, value in whole.items()},
            "unit": model.layers[1].state_dict(prefix="layers.1."),
        }
        assert whole["inner.lower.weight"].data_ptr() == whole["inner.again.weight"].data_ptr(), "ties stay"
        if layout.stage == 3:
            assert model.lower.weight.isnan().all(), "freed again"
            optimizer.hold()
            model(batch(0)[0])
            held = model.state_dict()
            optimizer.release()
            result["held"] = {name: value.clone() for name, value in held.items()}
            assert all(isinstance(value, nn.Parameter) for value in model.layers.state_dict(keep_vars=True).values())
        optimizer.close()
        after = nn.Module.state_dict(model)
        assert after["lower.weight"].data_ptr() == model.lower.weight.data_ptr(), "plain again"
        results.append(result)
    return results


@pytest.mark.parametrize("ranks", [2, 4])
def test_state_dicts_are_whole_in_every_stage(ranks: int) -> None:
    layouts = [Layout(stage) for stage in STAGES] + [Layout(3, replicas=2), Layout(2, replicas=2)]
    results = run(ranks, state_dicts, layouts)
    expected = {"weights": plainly(2)["weights"]}
    torch.manual_seed(0)
    names = list(Net().state_dict())
    for number in range(len(layouts)):
        assert all(other[number]["full"] == {} for other in results[1:])
        assert list(results[0][number]["full"]) == names
        assert_parity(expected, {"weights": results[0][number]["full"]})
        for way in ("model", "parent", "held"):
            if way in results[0][number]:
                assert list(results[0][number][way]) == names
                assert_parity(expected, [{"weights": result[number][way]} for result in results])
        unit = {name: value for name, value in expected["weights"].items() if name.startswith("layers.1.")}
        assert_parity({"weights": unit}, [{"weights": result[number]["unit"]} for result in results])


@pytest.mark.parametrize("stage", STAGES)
def test_masters_are_given_rather_than_rounded_weights(stage: int) -> None:
    model, optimizer = make(Layout(stage, bf16=True))
    full = zero.full_state_dict(model, optimizer)
    torch.manual_seed(0)
    plain = Net()
    trained = {name for name, p in plain.named_parameters(remove_duplicate=False) if p.requires_grad}
    for name, value in plain.state_dict().items():
        rounded = value.is_floating_point() and name not in (*trained, "shift")  # frozen: has no master
        expected = value.bfloat16() if rounded else value
        assert torch.equal(full[name], expected), name
        assert full[name].dtype == expected.dtype, name


def test_full_state_dicts_are_copies() -> None:
    for stage in STAGES:
        model, optimizer = make(Layout(stage))
        full = zero.full_state_dict(model, optimizer)
        before = {name: value.clone() for name, value in full.items()}
        train(model, optimizer, range(1))
        optimizer.close()
        model.shift.zero_()
        assert all(torch.equal(full[name], value) for name, value in before.items())


class Large(nn.Module):
    """Eight equal units of 256 KiB."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(256, 255) for _ in range(8)])


UNIT = 4 * 256 * 256  # bytes, with biases
WHOLE = 8 * UNIT


def memory_of_full_state_dict() -> list[int]:
    peaks = []
    for stage in (1, 3):
        model = Large()
        optimizer = zero.shard(model, sgd, axis=core.Mesh(dp=4).dp, stage=stage, bucket_bytes=UNIT // 2)
        peaks.append(peak_bytes(lambda: zero.full_state_dict(model, optimizer)))  # noqa: B023 - called at once
        ones = {name: torch.ones(value.shape) for name, value in model.state_dict().items()}
        state = ones if rank() == 0 else None
        peaks.append(peak_bytes(lambda: zero.load_full_state_dict(model, optimizer, state)))  # noqa: B023
        assert model.state_dict()["layers.7.bias"].sum().item() == 255
    return peaks


def test_ranks_that_get_nothing_hold_one_bucket_at_a_time() -> None:
    first, *others = run(4, memory_of_full_state_dict)
    assert WHOLE <= first[0] <= WHOLE + 1.2 * UNIT
    for peaks in others:
        assert UNIT <= peaks[0] < 1.2 * UNIT  # stages 1 and 3: the gathered bucket
        assert UNIT <= peaks[2] < 1.2 * UNIT
    for peaks in (first, *others):
        assert peaks[1] < 1.3 * UNIT
        assert peaks[3] < 1.3 * UNIT


# ---------------------------------------------------------------------------------------------------- loading in memory


def load_by(way: str, model: Net, optimizer: zero.ZeroOptimizer, whole: dict[str, Tensor]) -> None:
    if way == "load_state_dict":
        assert not any(model.load_state_dict(whole))
    elif way == "in parts":
        units = {f"inner.{name}": value for name, value in whole.items() if name.startswith("layers.")}
        nn.ModuleDict({"inner": model}).load_state_dict(units, strict=False)
        model.load_state_dict({n: v for n, v in whole.items() if not n.startswith("layers.")}, strict=False)
    elif way == "a unit itself":
        model.load_state_dict({n: v for n, v in whole.items() if not n.startswith("layers.0.")}, strict=False)
        model.layers[0].load_state_dict(
            {n.removeprefix("layers.0."): v for n, v in whole.items() if n.startswith("layers.0.")}
        )
    else:
        zero.load_full_state_dict(model, optimizer, whole if rank() == 0 else {})


def loaded(layouts: list[Layout], way: str) -> list[dict[str, Any]]:
    """Weights are loaded before the first step, or after two whose optimizer state is forgotten; then a step."""
    results = []
    torch.manual_seed(0)
    whole = Net().double().state_dict()
    for layout in layouts:
        for steps in (0, 2):
            model, optimizer = make(layout, seed=1 + rank())
            train(model, optimizer, range(steps))
            load_by(way, model, optimizer, whole)
            if layout.stage == 3:
                assert model.lower.weight.isnan().all(), "freed again"
                assert model.layers[0].scale.isnan()
            for state in optimizer.state.values():
                for value in state.values():
                    value.zero_()
            results.append(train(model, optimizer, range(1)))
    return results


@pytest.mark.parametrize("way", ["load_state_dict", "in parts", "a unit itself", "load_full_state_dict"])
def test_weights_are_loaded_in_every_stage(way: str) -> None:
    layouts = [Layout(stage) for stage in STAGES]
    if way == "load_full_state_dict":
        layouts += [Layout(3, replicas=2), Layout(1, replicas=2)]
    results = run(4 if way == "load_full_state_dict" else 2, loaded, layouts, way)
    for number in range(2 * len(layouts)):
        assert_parity(plainly(1), [result[number] for result in results])


@pytest.mark.parametrize("stage", STAGES)
def test_what_cannot_be_loaded_says_so(stage: int) -> None:
    model, optimizer = make(Layout(stage))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"assign=True\) would take the parameters away"):
        model.load_state_dict(state, assign=True)
    with pytest.raises(RuntimeError, match=r"size mismatch for head\.weight"):
        model.load_state_dict({**state, "head.weight": torch.ones(3, 8)})
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "layers.0.scale"'):
        model.load_state_dict({name: value for name, value in state.items() if name != "layers.0.scale"})
    train(model, optimizer, range(1))  # and the model is as usable as before
    with pytest.raises(ValueError, match=r"the state has no layers\.0\.scale"):
        zero.load_full_state_dict(model, optimizer, {n: v for n, v in state.items() if n != "layers.0.scale"})
    with pytest.raises(ValueError, match="the state has extra, which the model does not have"):
        zero.load_full_state_dict(model, optimizer, {**state, "extra": torch.ones(1)})
    with pytest.raises(ValueError, match=r"head\.weight has shape \[3, 8\], the model needs \[3, 7\]"):
        zero.load_full_state_dict(model, optimizer, {**state, "head.weight": torch.ones(3, 8)})
    with pytest.raises(ValueError, match=r"not the model of this optimizer, whose .* it does not have"):
        zero.full_state_dict(Net(), optimizer) if stage else zero.save("nowhere", Net(), optimizer)
    zero.load_full_state_dict(model, optimizer, {n: v for n, v in state.items() if n != "again.weight"})
    assert_parity({"weights": state}, {"weights": model.state_dict()}, rtol=0.0)


def first_rank_refuses() -> str:
    model, optimizer = make(Layout(3))
    with pytest.raises(ValueError, match="state") as caught:
        zero.load_full_state_dict(model, optimizer, {"odd": torch.ones(1)} if rank() == 0 else None)
    train(model, optimizer, range(1))
    return str(caught.value)


def test_all_ranks_hear_that_the_first_refuses() -> None:
    first, second = run(2, first_rank_refuses)
    assert first == "the state has no empty"
    assert second == "the first rank's state does not fit the model: see its error"


def masters_after(stage: int, way: str) -> float:
    """S-12: weights of 2.0 into a model in bf16 that began with 0; a step of 0.1 times a gradient of 1."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    policy = zero.PrecisionPolicy(torch.bfloat16)
    optimizer = zero.shard(model, sgd, axis=core.Mesh(dp=world()).dp, stage=stage, policy=policy)
    if way == "load_state_dict":
        model.load_state_dict({"weight": torch.full((1, 1), 2.0)})
    elif way == "gathered":
        with torch.no_grad(), zero.gathered(model):
            model.weight.fill_(2.0)
    else:
        zero.load_full_state_dict(model, optimizer, {"weight": torch.full((1, 1), 2.0)} if rank() == 0 else None)
    model(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    return zero.full_state_dict(model, optimizer).get("weight", torch.full((), 1.9)).item()


def stale_masters() -> dict[str, float]:
    ways = ("load_state_dict", "gathered", "load_full_state_dict")
    return {f"{stage} {way}": masters_after(stage, way) for stage in STAGES for way in ways}


def test_masters_are_never_stale() -> None:
    for result in run(2, stale_masters):
        assert result == pytest.approx(dict.fromkeys(result, 1.9), rel=1e-6)
        assert len(result) == 12


# ----------------------------------------------------------------------------------------------------- checkpoints


def moved(path: str, before: int, step: int, layouts: list[Layout]) -> list[list[dict[str, Any]]]:
    """Every layout goes on for one step from the checkpoints of every layout before; one of these is saved."""
    results = []
    for number, layout in enumerate(layouts):
        of_layout = []
        for number_before in range(before):
            model, optimizer = make(layout, seed=1 + rank())
            zero.load(f"{path}-{step}-{number_before}", model, optimizer)
            of_layout.append(train(model, optimizer, range(step, step + 1)))
            if number_before == (number + 1) % before:
                zero.save(f"{path}-{step + 1}-{number}", model, optimizer, extra={"step": step + 1})
        results.append(of_layout)
    return results


def begun(path: str, layouts: list[Layout]) -> list[dict[str, Any]]:
    results = []
    for number, layout in enumerate(layouts):
        model, optimizer = make(layout)
        results.append(train(model, optimizer, range(1)))
        zero.save(f"{path}-1-{number}", model, optimizer, extra={"step": 1})
    return results


@needs_safetensors
@pytest.mark.parametrize("momentum", [False, True])
def test_a_run_moves_from_any_stage_and_number_of_ranks_to_any_other(momentum: bool, tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    layouts = [Layout(stage, momentum) for stage in STAGES]
    others = [
        Layout(0, momentum, more={"bucket_bytes": 10**6}),
        Layout(1, momentum, more={"bucket_bytes": 1}),
        Layout(2, momentum, replicas=2),
        Layout(3, momentum, replicas=2, more={"units": ["layers.*", "head"]}),
    ]
    for result in run(4, begun, path, layouts):
        for of_layout in result:
            assert_parity(plainly(1, momentum), of_layout)
    for step, (ranks, here) in enumerate([(2, layouts), (1, layouts), (4, others)], start=1):
        results = run(ranks, moved, path, 4, step, here)
        expected = plainly(step + 1, momentum)
        for number in range(4):
            for before in range(4):
                assert_parity(expected, [result[number][before] for result in results])
    assert checkpoint.read_extra(f"{path}-4-3")["step"] == 4
    files = checkpoint.describe(f"{path}-4-3")
    weights = dict(expected["weights"])
    del weights["again.weight"]  # tied: stored once
    assert {name.removeprefix("model."): t.shape for name, t in files.items() if name.startswith("model.")} == {
        name: value.shape for name, value in weights.items()
    }
    stateful = {name.split(".", 2)[2] for name in files if name.startswith("optimizer.")}
    assert ("layers.0.scale" in stateful) is not momentum
    assert not stateful & {"head.bias", "layers.1.up.weight", "empty", "again.weight", "places"}


def interrupted_and_not(path: str, layouts: list[Layout]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    results = []
    for number, layout in enumerate(layouts):
        model, optimizer = make(layout)
        train(model, optimizer, range(2))
        zero.save(f"{path}-{number}", model, optimizer)
        straight = train(model, optimizer, range(2, STEPS))
        straight["masters"] = zero.full_state_dict(model, optimizer)
        model, optimizer = make(layout, seed=1 + rank())
        train(model, optimizer, range(3))
        zero.load(f"{path}-{number}", model, optimizer)
        resumed = train(model, optimizer, range(2, STEPS))
        resumed["masters"] = zero.full_state_dict(model, optimizer)
        results.append((straight, resumed))
    return results


@needs_safetensors
@pytest.mark.parametrize("ranks", [1, 2])
def test_in_the_same_layout_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(ranks: int, tmp_path: Path) -> None:
    layouts = [Layout(stage, bf16=bf16) for stage in STAGES for bf16 in (False, True)]
    for pairs in run(ranks, interrupted_and_not, str(tmp_path / "c"), layouts):
        for straight, resumed in pairs:
            assert_parity(straight, resumed, rtol=0.0)
            assert {n: v.dtype for n, v in straight["weights"].items()} == {
                n: v.dtype for n, v in resumed["weights"].items()
            }


def saved_in_parts(path: str) -> list[int]:
    """Highest memory while saving, on this rank, for stages 1 and 3."""
    peaks: list[int] = []
    begun: list[Any] = []
    for stage in (1, 3):
        model = Large()
        optimizer = zero.shard(model, torch.optim.Adam, axis=core.Mesh(dp=4).dp, stage=stage, bucket_bytes=UNIT // 2)
        optimizer.step()
        peaks.append(peak_bytes(lambda: zero.save(f"{path}-{stage}", model, optimizer)))  # noqa: B023 - called at once
        peaks.append(peak_bytes(lambda: zero.load(f"{path}-{stage}", model, optimizer)))  # noqa: B023
        peaks.append(peak_bytes(lambda: begun.append(zero.save_in_background(f"{path}-b", model, optimizer))))  # noqa: B023
        begun.pop().finish()
    return peaks


@needs_safetensors
def test_a_rank_holds_its_share_of_the_files_and_one_bucket(tmp_path: Path) -> None:
    share = 3 * WHOLE // 4  # weights and two moments, on four ranks
    for peaks in run(4, saved_in_parts, str(tmp_path / "c")):
        for saving, loading, collecting in (peaks[:3], peaks[3:]):
            assert 0.99 * share < collecting <= 2 * share + 0.3 * UNIT, "a copy, and what is being written of it"
            # what is written is put together in memory once more, in files of at most a GiB
            assert saving <= 1.1 * share + 0.3 * UNIT
            # the mapping of the files counts, and is no memory
            assert loading - 3 * WHOLE <= 2 * WHOLE // 4 + 0.3 * UNIT, "new moments, nothing whole"
    sizes = [file.stat().st_size for file in (tmp_path / "c-3").glob("*.safetensors")]
    assert len(sizes) == 4
    assert max(sizes) - min(sizes) < UNIT // 2, "each writes as much"


def killed_while_saving(path: str) -> None:
    """S-11: rank 1 dies when it has written half of its file."""
    model, optimizer = make(Layout(3))
    train(model, optimizer, range(1))
    zero.save(f"{path}-1", model, optimizer)
    train(model, optimizer, range(1, 2))
    filesystem = torch.distributed.checkpoint.filesystem.FileSystem

    def create_stream(_self: Any, name: str, _mode: str) -> Any:
        Path(name).write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)

    if rank() == 1:
        filesystem.create_stream = create_stream
    zero.save(f"{path}-2", model, optimizer)


def resumed(path: str, steps: range) -> dict[str, Any]:
    model, optimizer = make(Layout(3), seed=1)
    zero.load(path, model, optimizer)
    return train(model, optimizer, steps)


@needs_safetensors
def test_a_rank_killed_while_saving_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    with pytest.raises(RuntimeError, match="rank 1 died with exit code -9"):
        run(2, killed_while_saving, path, timeout_s=60)
    assert not Path(f"{path}-2").exists()
    assert_parity(plainly(2), run(2, resumed, f"{path}-1", range(1, 2)))


@needs_safetensors
@pytest.mark.parametrize("stage", STAGES)
def test_what_does_not_fit_is_refused_and_nothing_changes(stage: int, tmp_path: Path) -> None:
    model, optimizer = make(Layout(stage))
    train(model, optimizer, range(1))
    zero.save(tmp_path / "small", model, optimizer)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    larger = Net().double()
    larger.extra = nn.Linear(2, 2).double()
    optimizer_of_larger = zero.shard(larger, adamw, axis=core.Mesh().dp, stage=stage)
    zero.save(tmp_path / "large", larger, optimizer_of_larger)
    with pytest.raises(ValueError, match=r"small has no model\.extra\.weight"):
        zero.load(tmp_path / "small", larger, optimizer_of_larger)
    with pytest.raises(ValueError, match=r"holds extra\.(weight|bias), which the model does not have"):
        zero.load(tmp_path / "large", model, optimizer)
    checkpoint.save(tmp_path / "foreign", {"model.head.weight": torch.ones(3, 7)})
    with pytest.raises(ValueError, match=r"foreign was not written by nanopar_zero\.save"):
        zero.load(tmp_path / "foreign", model, optimizer)
    with pytest.raises(ValueError, match="missing is not a checkpoint"):
        zero.load(tmp_path / "missing", model, optimizer)
    odd = Net().double()
    odd.head = nn.Linear(7, 4).double()
    with pytest.raises(ValueError, match=r"model\.head\.weight has shape \[3, 7\], the model needs \[4, 7\]"):
        zero.load(tmp_path / "small", odd, zero.shard(odd, adamw, axis=core.Mesh().dp, stage=stage))
    (file,) = (tmp_path / "small").glob("*.safetensors")
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(ValueError, match=f"small is damaged: {file.name} has"):
        zero.load(tmp_path / "small", model, optimizer)
    assert_parity({"weights": before}, {"weights": model.state_dict()}, rtol=0.0)


@needs_safetensors
def test_groups_may_be_cut_anew_where_the_states_allow_it(tmp_path: Path) -> None:
    model, optimizer = make(Layout(1))
    train(model, optimizer, range(1))
    zero.save(tmp_path / "c", model, optimizer)
    other, second = make(Layout(3), seed=1)
    second.close()
    with pytest.raises(ValueError, match="c has 2 parameter groups, the optimizer 1"):
        zero.load(tmp_path / "c", other, zero.shard(other, adamw, axis=core.Mesh().dp, stage=3))
    frozen = Net().double()
    frozen.head.bias.requires_grad_(True)
    swapped = [{"params": ["layers*"]}, {"params": ["lower*", "again*", "head*", "empty"]}]
    optimizer = zero.shard(frozen, adamw, axis=core.Mesh().dp, stage=3, groups=swapped)
    with pytest.raises(ValueError, match=r"states \['exp_avg', .*\] of .* and \[\] of head\.bias, which are both in"):
        zero.load(tmp_path / "c", frozen, optimizer)
    optimizer.close()
    frozen.head.bias.requires_grad_(False)
    optimizer = zero.shard(frozen, adamw, axis=core.Mesh().dp, stage=3, groups=swapped)
    zero.load(tmp_path / "c", frozen, optimizer)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    assert_parity({"weights": weights}, {"weights": frozen.state_dict()}, rtol=0.0)
    names, moments = [], {}
    for shard in optimizer.shards:
        for slot in shard.bucket.layout.slots:
            if slot.item.group == shard.run.group and slot.numel:
                start = slot.start - shard.run.start
                moments[slot.item.name] = optimizer.state[shard.flat]["exp_avg"][start : start + slot.numel]
                names.append(slot.item.name)
    torch.manual_seed(0)
    plain = Net().double()
    loss_of(plain, *batch(0), 3 * ROWS).backward()
    expected = {
        name: 0.1 * p.grad.flatten() for name, p in plain.named_parameters() if p.grad is not None and p.numel()
    }
    assert_parity({"weights": expected}, {"weights": {name: moments[name] for name in expected}})


@needs_safetensors
@pytest.mark.parametrize("compile_first", [False, True])
def test_compiled_and_plain_models_have_the_same_checkpoints(compile_first: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = Net().double()
    compiled: Any = torch.compile(plain, backend="eager")
    optimizer = zero.shard(compiled if compile_first else plain, adamw, axis=core.Mesh().dp, stage=3)
    zero.save(tmp_path / "c", compiled if compile_first else plain, optimizer)
    assert not [name for name in checkpoint.describe(tmp_path / "c") if "_orig_mod" in name]
    other = Net().double()
    again: Any = other if compile_first else torch.compile(other, backend="eager")
    optimizer = zero.shard(again, adamw, axis=core.Mesh().dp, stage=1)
    zero.load(tmp_path / "c", again, optimizer)
    torch.manual_seed(0)
    assert_parity({"weights": Net().double().state_dict()}, {"weights": other.state_dict()}, rtol=0.0)


@needs_safetensors
def test_options_and_what_the_precision_needs_come_back(tmp_path: Path) -> None:
    def with_tensor_lr(groups: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups, lr=torch.tensor(0.25), betas=(0.8, 0.9), foreach=False, capturable=False)

    policy = zero.PrecisionPolicy(torch.float16, loss_scale=zero.LossScale(initial=64.0))
    model = nn.Linear(3, 2)
    optimizer = zero.shard(model, with_tensor_lr, axis=core.Mesh().dp, stage=2, policy=policy)
    optimizer.scale(model(torch.full((1, 3), float("inf"), dtype=torch.float16)).sum()).backward()
    optimizer.step()  # skipped
    assert optimizer.loss_scale == 32.0
    optimizer.param_groups[0]["lr"].fill_(0.125)
    optimizer.param_groups[0]["betas"] = (0.5, 0.75)
    zero.save(tmp_path / "c", model, optimizer, extra={"groups": "a key of the caller's"})
    assert checkpoint.read_extra(tmp_path / "c")["groups"] == "a key of the caller's"
    model = nn.Linear(3, 2)
    optimizer = zero.shard(model, with_tensor_lr, axis=core.Mesh().dp, stage=3, policy=policy)
    rate = optimizer.param_groups[0]["lr"]
    zero.load(tmp_path / "c", model, optimizer)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 0.125
    assert optimizer.param_groups[0]["betas"] == (0.5, 0.75)
    assert optimizer.loss_scale == 32.0


def divided_elsewhere() -> None:
    mesh = core.Mesh(tp=2)
    for frozen in (False, True):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(not frozen))
        specs = {"1.weight": core.ParamSpec(shards=(core.Shard(mesh.tp, 0),))}
        optimizer = zero.shard(model, sgd, axis=mesh.dp, stage=1, specs=specs)
        with pytest.raises(ValueError, match=r"1\.weight is divided over tp too; fill the model before shard"):
            zero.load_full_state_dict(model, optimizer, None)


def test_parameters_divided_over_other_axes_are_not_filled_wrongly() -> None:
    run(2, divided_elsewhere)


# ---------------------------------------------------------------------------------------------------- after close


def lives(stages: list[int], bf16: bool) -> list[dict[str, Any]]:
    """A step in each stage, one after the other, on the same model; of copies made between them."""
    model, optimizer = make(Layout(stages[0], bf16=bf16), seed=rank())
    results = []
    for step, stage in enumerate(stages):
        if step:
            options = {"groups": DECAY, "bucket_bytes": 300}
            policy = zero.PrecisionPolicy(torch.bfloat16) if bf16 else None
            optimizer = zero.shard(model, adamw, axis=core.Mesh(dp=world()).dp, stage=stage, policy=policy, **options)
        optimizer.hold()
        train(model, optimizer, range(step, step + 1))
        optimizer.close()
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        copies = {"deepcopy": copy.deepcopy(model), "pickle": torch.load(file, weights_only=False), "itself": model}
        states = {name: {n: v.clone() for n, v in each.state_dict().items()} for name, each in copies.items()}
        for each in (copies["deepcopy"], copies["pickle"]):
            with core.ledger() as book:
                each(batch(0)[0].to(each.lower.weight.dtype)).sum().backward()
            assert not book.records
            assert each.lower.weight.grad is not None
            assert each.again.weight is each.lower.weight
        assert model.lower.weight.grad is None
        results.append(states)
    return results


@pytest.mark.parametrize("stages", [[0, 1, 2, 3], [3, 2, 1, 0], [3, 3, 1, 1]])
def test_models_are_plain_after_close_and_may_be_sharded_again(stages: list[int]) -> None:
    torch.manual_seed(0)
    plain = Net().double()
    expected = []
    for step in range(4):
        optimizer = adamw(named_groups(plain, DECAY))
        optimizer.param_groups[0]["lr"] = 0.01 * (1 + step)
        loss_of(plain, *batch(step), 3 * ROWS).backward()
        optimizer.step()
        plain.zero_grad()
        expected.append({name: value.clone() for name, value in plain.state_dict().items()})
    results = run(2, lives, stages, False)
    for step in range(4):
        for which in ("itself", "deepcopy", "pickle"):
            assert_parity({"weights": expected[step]}, [{"weights": result[step][which]} for result in results])


def test_models_in_bf16_may_be_sharded_again() -> None:
    first, second = run(2, lives, [3, 0, 1, 2], True)
    assert_parity(first[-1]["itself"], second[-1]["itself"], rtol=0.0)
    assert all(value.isfinite().all() for value in first[-1]["pickle"].values())
