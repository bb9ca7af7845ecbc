"""Models from the meta device: filled module by module, equal to one process' model, and never whole on a rank."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.zero.layouts import DECAY, STAGES, Layout, Net, adamw, batch, loss_of, make, named_groups, rank, sgd, world
from tests.zero.memory import peak_bytes
from torch import Tensor, nn

import nanopar_core as core
import nanopar_zero as zero
from nanopar_core.testing import assert_parity, run


def fill(module: nn.Module) -> None:
    """Values that depend on the order of calls."""
    for parameter in module.parameters(recurse=False):
        if parameter.is_floating_point():
            parameter.normal_(std=0.3)
        else:
            parameter.copy_(torch.arange(4))
    for buffer in module.buffers(recurse=False):
        buffer.normal_()


def on_meta(make_model: Callable[[], nn.Module]) -> Any:
    with torch.device("meta"):
        return make_model()


def everything(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}


def owners(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if any(True for _ in (*m.parameters(False), *m.buffers(False)))]


# --------------------------------------------------------------------------------------------------------- values


def filled(layouts: list[Layout]) -> list[dict[str, Any]]:
    results = []
    for layout in layouts:
        mesh = core.Mesh(dp=world() // layout.replicas, dp_replicate=layout.replicas)
        model = on_meta(lambda: Net().double())
        model.lower.weight.note = "kept"
        model.layers[0].down = nn.Linear(9, 7, bias=False).double()  # a part that has its values already
        torch.manual_seed(1)
        nn.init.normal_(model.layers[0].down.weight)
        torch.manual_seed(2 + rank())
        optimizer = zero.shard(
            model,
            adamw,
            axis=mesh.dp,
            replicate=mesh.dp_replicate if layout.replicas > 1 else None,
            stage=layout.stage,
            groups=DECAY,
            init=fill,
            **layout.more,
        )
        assert model.again.weight is model.lower.weight
        assert model.lower.weight.note == "kept"
        assert not model.head.bias.requires_grad
        assert model.state_dict().keys() == Net().state_dict().keys()
        with zero.gathered(model):
            result: dict[str, Any] = {"begin": everything(model)}
        x, y = batch(0)
        rows = slice(rank() * 8 // world(), (rank() + 1) * 8 // world())
        loss_of(model, x[rows], y[rows], 24 // world()).backward()
        optimizer.step()
        results.append(result | {"weights": {name: value.clone() for name, value in model.state_dict().items()}})
    return results


@pytest.mark.parametrize("ranks", [1, 4])
def test_values_are_those_of_one_process_filled_in_the_same_order(ranks: int) -> None:
    torch.manual_seed(0)
    plain = Net().double()
    torch.manual_seed(1)
    nn.init.normal_(plain.layers[0].down.weight)
    torch.manual_seed(2)
    with torch.no_grad():
        for module in owners(plain):
            if module is not plain.layers[0].down:
                fill(module)
    begin = everything(plain)
    optimizer = adamw(named_groups(plain, DECAY))
    loss_of(plain, *batch(0), 24).backward()
    optimizer.step()
    layouts = [Layout(stage, more={"bucket_bytes": size}) for stage in STAGES for size in (1, 300, 10**6)]
    layouts += [Layout(3, replicas=2), Layout(3, more={"units": ["lower", "again", "layers.*", "head"]})][: ranks // 2]
    results = run(ranks, filled, layouts)
    for number in range(len(layouts)):
        assert_parity({"begin": begin}, [{"begin": result[number]["begin"]} for result in results], rtol=0.0)
        weights = [{"weights": result[number]["weights"]} for result in results]
        assert_parity({"weights": plain.state_dict()}, weights)


def test_init_is_called_once_for_each_module_with_something_of_its_own() -> None:
    for stage in STAGES:
        model = on_meta(Net)
        called: list[nn.Module] = []

        def init(module: nn.Module, called: list[nn.Module] = called) -> None:
            assert not torch.is_grad_enabled()
            assert not any(t.is_meta for t in (*module.parameters(False), *module.buffers(False)))
            called.append(module)
            fill(module)

        zero.shard(model, sgd, axis=core.Mesh().dp, stage=stage, init=init)
        assert called == owners(model)


def from_the_first_rank_alone() -> dict[str, Tensor]:
    model = on_meta(Net)
    torch.manual_seed(5)
    optimizer = zero.shard(
        model, sgd, axis=core.Mesh(dp=2).dp, stage=3, init=fill if rank() == 0 else lambda _module: None
    )
    state = {name: value.clone() for name, value in model.state_dict().items()}
    ones = {name: torch.ones_like(value) for name, value in state.items()} if rank() == 0 else None
    zero.load_full_state_dict(model, optimizer, ones)
    assert all(value.eq(1).all() for value in model.state_dict().values())
    return state


def test_the_first_rank_alone_may_fill() -> None:
    plain = Net()
    torch.manual_seed(5)
    with torch.no_grad():
        for module in owners(plain):
            fill(module)
    results = run(2, from_the_first_rank_alone)
    assert_parity({"weights": plain.state_dict()}, [{"weights": result} for result in results], rtol=0.0)


def resumed(path: str) -> dict[str, Tensor]:
    """A checkpoint is the other way to fill a model."""
    model, optimizer = make(Layout(1))
    zero.save(path, model, optimizer)
    empty = on_meta(lambda: Net().double())
    optimizer = zero.shard(
        empty, adamw, axis=core.Mesh(dp=2).dp, stage=3, groups=DECAY, init=lambda module: zeros(module)
    )
    zero.load(path, empty, optimizer)
    return {name: value.clone() for name, value in empty.state_dict().items()}


def zeros(module: nn.Module) -> None:
    for tensor in (*module.parameters(False), *module.buffers(False)):
        tensor.zero_()


def test_a_checkpoint_fills_a_model_that_began_on_meta(tmp_path: Any) -> None:
    pytest.importorskip("safetensors")
    torch.manual_seed(0)
    expected = {"weights": Net().double().state_dict()}
    results = run(2, resumed, str(tmp_path / "c"))
    assert_parity(expected, [{"weights": result} for result in results], rtol=0.0)


# --------------------------------------------------------------------------------------------------------- memory


class Large(nn.Module):
    """Eight equal units of 256 KiB, and a table that the root ties to its head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 255)
        self.layers = nn.ModuleList([nn.Linear(256, 255) for _ in range(8)])
        self.head = nn.Linear(255, 16, bias=False)
        self.head.weight = self.embed.weight


UNIT = 4 * 256 * 256  # bytes
WHOLE = 8 * UNIT + 4 * 16 * 255


def memory_of_construction() -> list[int]:
    peaks = []
    for stage, policy in (
        (3, None),
        (3, zero.PrecisionPolicy(torch.bfloat16)),
        (1, zero.PrecisionPolicy(torch.bfloat16)),
    ):
        model = on_meta(Large)
        axis = core.Mesh(dp=4).dp
        kept: list[zero.ZeroOptimizer] = []
        peaks.append(
            peak_bytes(
                lambda: kept.append(  # noqa: B023 - called at once
                    zero.shard(model, sgd, axis=axis, stage=stage, init=fill, policy=policy, bucket_bytes=UNIT // 2)  # noqa: B023
                )
            )
        )
    return peaks


def test_no_rank_ever_holds_the_model() -> None:
    slack = 4 * 16 * 255 * 2 + 40_000  # the root, which is complete last, and scratch of the allocator and of init
    for plain, mixed, replicated in run(4, memory_of_construction):
        assert WHOLE // 4 < plain < WHOLE // 4 + 2 * UNIT + slack
        assert WHOLE // 4 < mixed < WHOLE // 4 + 2 * UNIT + slack
        assert 3 * WHOLE // 4 < replicated < 3 * WHOLE // 4 + 2 * UNIT + slack  # bf16 weights, a quarter of the masters


# --------------------------------------------------------------------------------------------------------- errors


def test_what_init_may_not_do() -> None:
    def build(init: Any, **more: Any) -> None:
        zero.shard(on_meta(Net), sgd, axis=core.Mesh().dp, stage=3, init=init, **more)

    def forgets_scales(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            fill(module)

    def forgets_a_row(module: nn.Module) -> None:
        fill(module)
        if isinstance(module, nn.Linear):
            module.weight[1] = float("nan")

    def replaces(module: nn.Module) -> None:
        fill(module)
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(torch.ones(module.weight.shape))

    def replaces_a_buffer(module: nn.Module) -> None:
        fill(module)
        if isinstance(module, Net):
            module.shift = torch.ones(8)

    with pytest.raises(ValueError, match=r"init left Net\.empty|init left Net\.shift \[7\] without values"):
        build(forgets_scales)
    with pytest.raises(ValueError, match=r"init left Linear\.weight \[7, 7\] without values, or NaN in it"):
        build(forgets_a_row)
    with pytest.raises(
        ValueError, match=r"init put another parameter in the place of Linear\.weight: write it in place"
    ):
        build(replaces)
    with pytest.raises(ValueError, match=r"init made Net\.shift torch\.float32 \[8\], it was torch\.float32 \[7\]"):
        build(replaces_a_buffer)
    with torch.device("meta"), pytest.raises(ValueError, match="default device, which is meta here"):
        build(fill)
    with pytest.raises(ValueError, match="parameter empty is on the meta device"):
        build(None)


# --------------------------------------------------------------------------------------------------- Hugging Face


def qwen(device: str) -> Any:
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(
        vocab_size=53,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=10,
        max_position_embeddings=32,
        tie_word_embeddings=True,
        use_cache=False,
    )
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config)


def tokens() -> Tensor:
    return torch.randint(53, (4, 9), generator=torch.Generator().manual_seed(0))


def qwen_on_this_rank() -> list[dict[str, Any]]:
    results = []
    axis = core.Mesh(dp=2).dp
    for stage in STAGES:
        model = qwen("meta")
        torch.manual_seed(3)
        optimizer = zero.shard(model, sgd, axis=axis, stage=stage, init=model._init_weights, bucket_bytes=20_000)
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        ids = tokens()[2 * axis.rank : 2 * axis.rank + 2]
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        mean = core.all_reduce(loss.detach(), axis).item() / 2
        results.append({"loss": [mean], "weights": weights, "buffers": buffers})
    return results


def test_a_hugging_face_model_from_meta_equals_one_that_was_filled_in_one_process() -> None:
    pytest.importorskip("transformers")
    plain = qwen("cpu")
    expected_buffers = {name: buffer.clone() for name, buffer in plain.named_buffers()}
    assert any("inv_freq" in name for name in expected_buffers)
    torch.manual_seed(3)
    with torch.no_grad():
        for module in owners(plain):
            plain._init_weights(module)
    loss = plain(input_ids=tokens(), labels=tokens()).loss
    optimizer = sgd(plain.parameters())
    loss.backward()
    optimizer.step()
    expected = {"loss": [loss.item()], "weights": plain.state_dict(), "buffers": expected_buffers}
    results = run(2, qwen_on_this_rank)
    for number in range(4):
        assert_parity(expected, [result[number] for result in results])
