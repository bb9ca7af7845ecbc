"""Which modules become units: pure, on models without ranks."""

import pytest
import torch
from torch import nn

from nanopar_zero.units import find_units, unit_of_parameters


class Decoder(nn.Module):
    """Like a language model: an embedding and a head of more than a MiB, blocks in a list, a small norm."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(5000, 64)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)) for _ in range(3)])
        self.norm = nn.LayerNorm(64)
        self.head = nn.Linear(64, 5000, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def test_blocks_and_large_layers_are_found_in_order() -> None:
    model = Decoder()
    units = find_units(model, None)
    assert [name for name, _ in units] == ["", "embed", "layers.0", "layers.1", "layers.2", "head"]
    assert units[0][1] is model
    owners = unit_of_parameters(model, units)
    assert owners["norm.weight"] == 0
    assert (owners["embed.weight"], owners["layers.1.0.weight"], owners["head.weight"]) == (1, 3, 5)


def test_a_tied_weight_belongs_to_the_root() -> None:
    model = Decoder(tied=True)
    assert unit_of_parameters(model, find_units(model, None))["embed.weight"] == 0


def test_small_layers_stay_with_the_root() -> None:
    model = nn.ModuleDict({"one": nn.Linear(4, 4), "two": nn.Linear(4, 4)})
    assert [name for name, _ in find_units(model, None)] == [""]


def test_units_by_name_pattern_and_module() -> None:
    model = Decoder()
    units = find_units(model, ["layers.*", model.head, "layers.1"])
    assert [name for name, _ in units] == ["", "layers.0", "layers.1", "layers.2", "head"]


@pytest.mark.parametrize(
    ("units", "message"),
    [
        (["layer.*"], "units: 'layer.*' matches no module of the model below its root"),
        ([nn.Linear(1, 1)], "units: a Linear is not a module of the model below its root"),
        (["layers.0", "layers.0.1"], "unit layers.0.1 lies inside unit layers.0: name one of them"),
        (["layers"], "unit layers is a ModuleList, which has no forward of its own: name its children, 'layers.*'"),
        ("layers.*", "units must be a list of names or modules, not one str"),
        ([3], "units: 3 is neither a name nor a module"),
    ],
)
def test_bad_units(units: object, message: str) -> None:
    with pytest.raises(ValueError) as error:
        find_units(Decoder(), units)  # type: ignore[arg-type]
    assert str(error.value) == message


def test_the_dtype_counts_for_what_is_large() -> None:
    model = nn.Sequential(nn.Embedding(6000, 64).to(torch.bfloat16), nn.LayerNorm(64))
    assert [name for name, _ in find_units(model, None)] == [""]
