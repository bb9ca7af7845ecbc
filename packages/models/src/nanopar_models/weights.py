"""Reading and writing model directories in the hub's layout.

    directory                                        in memory (transformers' names)
    config.json                                      PhiMoEConfig
    model.safetensors, or model-0000x-of-0000n.safetensors + model.safetensors.index.json
      ...block_sparse_moe.gate.weight           <->  ...mlp.router.weight
      ...block_sparse_moe.experts.E.w1.weight   <->  ...mlp.experts.gate_up_proj[E, :I]
      ...block_sparse_moe.experts.E.w3.weight   <->  ...mlp.experts.gate_up_proj[E, I:]
      ...block_sparse_moe.experts.E.w2.weight   <->  ...mlp.experts.down_proj[E]
      all other names                           <->  the same

Reading is strict: a missing, unexpected or mis-shaped tensor is an error that names it and its file. Files are memory
mapped and copied tensor by tensor into their final place, so the model is held once. Writing goes to a scratch folder
first; a directory never holds a half-written model that loads.
"""

import contextlib
import dataclasses
import itertools
import json
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from nanopar_models.config import PhiMoEConfig
from nanopar_models.phi_moe import PhiMoE

_CONFIG, _SINGLE, _INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
_PLAIN_NAME = re.compile(r"\w[\w.-]*")
_WEIGHT_FILE = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


class Piece(NamedTuple):
    """One tensor of a file: its hub name and the place in the parameter (an index) that it fills."""

    name: str
    place: tuple[int | slice, ...]


def hub_pieces(name: str, config: PhiMoEConfig) -> list[Piece]:
    """The hub's tensors that make up the parameter called ``name`` in memory."""
    hub = name.replace(".mlp.router.", ".block_sparse_moe.gate.").replace(".mlp.", ".block_sparse_moe.")
    stem, _, kind = hub.rpartition(".")
    width, experts = config.intermediate_size, range(config.num_local_experts)
    if kind == "gate_up_proj":
        halves = (("w1", slice(0, width)), ("w3", slice(width, 2 * width)))
        return [Piece(f"{stem}.{e}.{w}.weight", (e, rows)) for e in experts for w, rows in halves]
    if kind == "down_proj":
        return [Piece(f"{stem}.{e}.w2.weight", (e,)) for e in experts]
    return [Piece(hub, ())]


def checkpoint_folder(path_or_hub_id: str | Path) -> Path:
    """The local directory of a model: the path itself, or the downloaded copy of a hub id (``owner/name``).

    Downloading needs the package ``huggingface_hub`` (``pip install nanopar-models[hub]``).
    """
    path = Path(path_or_hub_id)
    if path.is_dir():
        return path
    if path.exists() or not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", str(path_or_hub_id)):
        raise ValueError(f"{path_or_hub_id} is neither a directory nor a hub id like owner/name")
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ValueError(
            f"there is no directory {path_or_hub_id}, and reading it from the hub needs huggingface_hub: "
            "pip install nanopar-models[hub]"
        ) from error
    try:
        return Path(snapshot_download(str(path_or_hub_id), allow_patterns=["*.json", "*.safetensors", "tokenizer*"]))
    except Exception as error:
        # The hub's client raises many kinds (network, name, permission); the user needs one message.
        raise ValueError(
            f"there is no directory {path_or_hub_id}, and the hub did not deliver a model of that name: {error}"
        ) from error


def read_config(folder: Path) -> PhiMoEConfig:
    """The configuration in ``folder``; ``ValueError`` names the file and what is wrong with it."""
    file = folder / _CONFIG
    try:
        return PhiMoEConfig.from_dict(_read_json(file))
    except ValueError as error:
        raise error if str(file) in str(error) else ValueError(f"{file}: {error}") from error


def load(
    path_or_hub_id: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    **changes: Any,
) -> PhiMoE:
    """A model from a directory or hub id, its weights in ``dtype`` (default: as stored) on ``device`` (default: CPU).

    ``changes`` override fields of the stored configuration, for example ``router_noise=True``.
    Raises ``ValueError`` for a file that is missing, damaged or not of this architecture, and for any tensor that is
    missing, unexpected or of another shape.
    """
    folder = checkpoint_folder(path_or_hub_id)
    model = PhiMoE(dataclasses.replace(read_config(folder), **changes), device="meta")
    load_parts(model, folder, {}, dtype=dtype, device=device)
    return model


def load_parts(
    model: PhiMoE,
    path_or_hub_id: str | Path,
    places: Mapping[str, Sequence[Sequence[range]]],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> None:
    """Fill a model that has parts of some weights, best built on the meta device; the rest of them is not read.

    ``places``: for a parameter of which this model has a part, by dim, the ranges of the whole one that it consists of
    (``nanopar_core.sharding.places_of``); parameters that are not named are whole. Parameters are replaced, in
    ``dtype`` (default: as stored) on ``device`` (default: CPU). Raises ``ValueError`` as `load` does, and for a part of
    another shape than the model's.
    """
    with opened(path_or_hub_id) as weights:
        state = {}
        for name, parameter in model.named_parameters():
            ranges = places.get(name, [[range(length)] for length in weights.shape(name)])
            part = [sum(map(len, of_dim)) for of_dim in ranges]
            if part != list(parameter.shape):
                raise ValueError(f"{name} is {list(parameter.shape)} here, but its places make {part}")
            state[name] = weights.read(name, ranges).to(device=device or "cpu", dtype=dtype)
    model.load_state_dict(state, assign=True)


class Weights:
    """The weights of a directory by their names in memory, read one by one."""

    def __init__(
        self, shapes: Mapping[str, Sequence[int]], sources: "dict[str, list[Piece]]", files: "dict[str, _File]"
    ) -> None:
        self._shapes, self._sources, self._files = shapes, sources, files

    def shape(self, name: str) -> list[int]:
        """That of the whole parameter."""
        return list(self._shapes[name])

    def read(self, name: str, ranges: Sequence[Sequence[range]] | None = None) -> Tensor:
        """What lies at these places of a parameter, several ranges of each dim one after the other; default: all."""
        shape, pieces = self.shape(name), self._sources[name]
        ranges = [[range(length)] for length in shape] if ranges is None else ranges
        stored = _DTYPES[self._files[pieces[0].name].tensor(pieces[0].name).get_dtype()]
        out = torch.empty([sum(map(len, of_dim)) for of_dim in ranges], dtype=stored)
        for piece in pieces:
            _read(self._files[piece.name].handle, piece, shape, ranges, out)
        return out


@contextlib.contextmanager
def opened(path_or_hub_id: str | Path) -> Iterator[Weights]:
    """The weights of a directory or hub id, valid inside the block; nothing is read yet.

    Raises ``ValueError`` as `load` does.
    """
    folder = checkpoint_folder(path_or_hub_id)
    whole = PhiMoE(read_config(folder), device="meta")
    with contextlib.ExitStack() as stack:
        files = _open_files(folder, stack)
        shapes = {name: parameter.shape for name, parameter in whole.named_parameters()}
        yield Weights(shapes, _match(whole, files, folder), files)


def _read(handle: Any, piece: Piece, shape: Sequence[int], ranges: Sequence[Sequence[range]], target: Tensor) -> None:
    """Copy what ``target``, these ranges of a parameter of ``shape``, has of a stored piece; read nothing else."""
    by_dim: list[list[tuple[int | slice, int | slice | None]]] = []  # places in the target and in the piece
    for dim, length in enumerate(shape):
        at = piece.place[dim] if dim < len(piece.place) else slice(length)
        covered = range(at, at + 1) if isinstance(at, int) else range(length)[at]
        found: list[tuple[int | slice, int | slice | None]] = []
        first = 0
        for wanted in ranges[dim]:
            start, stop = max(wanted.start, covered.start), min(wanted.stop, covered.stop)
            here = first + start - wanted.start
            if start < stop and isinstance(at, int):
                found.append((here, None))  # the piece has no such dim
            elif start < stop:
                found.append((slice(here, here + stop - start), slice(start - covered.start, stop - covered.start)))
            first += len(wanted)
        by_dim.append(found)
    for places in itertools.product(*by_dim):
        in_target = tuple(mine for mine, _ in places)
        in_piece = tuple(stored for _, stored in places if stored is not None)
        target[in_target].copy_(handle.get_slice(piece.name)[in_piece])


def save(model: PhiMoE, path: str | Path, *, max_shard_size: int | str = "5GB") -> None:
    """Write ``model`` to the directory ``path`` as transformers reads it; see `save_state_dict`."""
    save_state_dict(model.state_dict(), model.config, path, max_shard_size=max_shard_size)


def save_state_dict(
    state: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    config: PhiMoEConfig,
    path: str | Path,
    *,
    max_shard_size: int | str = "5GB",
) -> None:
    """Write whole weights, under their names in memory, to the directory ``path`` in the hub's layout.

    ``state`` may be an iterator of (name, tensor): no more than one shard is then held. Shards hold at most
    ``max_shard_size`` bytes (or one larger tensor). Other files in the directory stay; an older model there is replaced
    only once the new one is complete, and nothing half-written ever loads. ``ValueError`` for missing, unexpected or
    mis-shaped tensors.
    """
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} exists and is not a directory")
    limit = _parse_bytes(max_shard_size)
    folder.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".saving-", dir=folder))
    try:
        pairs = state.items() if isinstance(state, Mapping) else state
        shards, dtype = _write_shards(_checked(pairs, config), config, scratch, limit)
        names = _name_shards(shards, scratch)
        values = {**config.to_dict(), "torch_dtype": str(dtype).removeprefix("torch.")}
        (scratch / _CONFIG).write_text(json.dumps(values, indent=2) + "\n")
        _publish(scratch, folder, names)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@dataclasses.dataclass(frozen=True)
class _File:
    """An open safetensors file."""

    path: Path
    handle: Any

    def tensor(self, name: str) -> Any:
        """The stored tensor's shape and dtype, unread."""
        return self.handle.get_slice(name)


def _read_json(file: Path) -> Any:
    if not file.is_file():
        raise ValueError(f"{file} does not exist")
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error


def _open_files(folder: Path, stack: contextlib.ExitStack) -> dict[str, _File]:
    """Every stored tensor's name with the open file that holds it."""
    if not (folder / _INDEX).is_file():
        if not (folder / _SINGLE).is_file():
            raise ValueError(f"{folder} has neither {_SINGLE} nor {_INDEX}")
        file = _open(folder / _SINGLE, stack)
        return dict.fromkeys(file.handle.keys(), file)
    index = _read_json(folder / _INDEX)
    placed = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(placed, dict) or not all(isinstance(value, str) for value in placed.values()):
        raise ValueError(f"{folder / _INDEX}: weight_map must map tensor names to file names")
    file_names = list(dict.fromkeys(placed.values()))
    for file_name in file_names:
        # Plain names only: an index may come from anywhere and must not reach outside its directory.
        if not _PLAIN_NAME.fullmatch(file_name):
            raise ValueError(f"{folder / _INDEX} points outside its directory: {file_name!r}")
    files: dict[str, _File] = {}
    for file_name in file_names:
        file = _open(folder / file_name, stack)
        for name in file.handle.keys():  # noqa: SIM118 - not a dict
            if placed.get(name) != file_name:
                raise ValueError(f"{file.path} holds {name}, which {_INDEX} places in {placed.get(name)}")
            files[name] = file
    for name, file_name in placed.items():
        if name not in files:
            raise ValueError(f"{folder / file_name} lacks {name}, which {_INDEX} places there")
    return files


def _open(file: Path, stack: contextlib.ExitStack) -> _File:
    try:
        return _File(file, stack.enter_context(safe_open(file, framework="pt")))
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} cannot be read as safetensors: {error}") from error


def _match(model: PhiMoE, files: dict[str, _File], folder: Path) -> dict[str, list[Piece]]:
    """Which stored tensors fill each parameter; raises where files and model do not fit exactly."""
    sources, missing = {}, []
    for name, parameter in model.named_parameters():
        # A file may also hold a parameter under its name in memory, experts already stacked.
        pieces = [Piece(name, ())] if name in files else hub_pieces(name, model.config)
        sources[name] = pieces
        for piece in pieces:
            if piece.name not in files:
                missing.append(piece.name)
                continue
            stored = files[piece.name].tensor(piece.name)
            wanted = list(parameter[piece.place].shape)
            if stored.get_shape() != wanted:
                raise ValueError(
                    f"{files[piece.name].path}: {piece.name} has shape {stored.get_shape()}, config.json needs {wanted}"
                )
            if stored.get_dtype() not in _DTYPES:
                raise ValueError(
                    f"{files[piece.name].path}: {piece.name} is stored as {stored.get_dtype()}; only "
                    f"{', '.join(_DTYPES)} are supported, not quantised weights"
                )
    unexpected = sorted(set(files) - {piece.name for pieces in sources.values() for piece in pieces})
    if missing:
        raise ValueError(f"{folder} lacks {_shorten(missing)}")
    if unexpected:
        raise ValueError(f"{files[unexpected[0]].path} holds unexpected {_shorten(unexpected)}")
    return sources


def _shorten(names: list[str]) -> str:
    more = f" and {len(names) - 3} more tensors" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _checked(pairs: Iterable[tuple[str, Tensor]], config: PhiMoEConfig) -> Iterator[tuple[str, Tensor]]:
    """``pairs``, each name and shape checked as it passes, completeness at the end."""
    wanted = {name: parameter.shape for name, parameter in PhiMoE(config, device="meta").named_parameters()}
    for name, tensor in pairs:
        if name not in wanted:
            raise ValueError(f"{name} is not a parameter of this model, or came twice")
        if tensor.shape != wanted[name]:
            raise ValueError(f"{name} has shape {list(tensor.shape)}, its config needs {list(wanted[name])}")
        del wanted[name]
        yield name, tensor
    if wanted:
        raise ValueError(f"the weights lack {_shorten(list(wanted))}")


def _write_shards(
    pairs: Iterable[tuple[str, Tensor]], config: PhiMoEConfig, scratch: Path, limit: int
) -> tuple[list[dict[str, int]], torch.dtype]:
    """Write numbered shards; for each the sizes in bytes of its tensors, and the first tensor's dtype."""
    shards: list[dict[str, int]] = []
    held: dict[str, Tensor] = {}
    held_bytes, dtype = 0, None

    def flush() -> None:
        save_file(held, scratch / str(len(shards)), metadata={"format": "pt"})
        shards.append({name: tensor.nbytes for name, tensor in held.items()})
        held.clear()

    for name, parameter in pairs:
        dtype = dtype or parameter.dtype
        for piece in hub_pieces(name, config):
            tensor = parameter.detach()[piece.place].cpu().contiguous()
            if held and held_bytes + tensor.nbytes > limit:
                flush()
                held_bytes = 0
            held[piece.name] = tensor
            held_bytes += tensor.nbytes
    flush()
    return shards, dtype or torch.float32


def _name_shards(shards: list[dict[str, int]], scratch: Path) -> list[str]:
    """Give the numbered shards their final names, with an index where there are several; all weight files' names."""
    if len(shards) == 1:
        (scratch / "0").rename(scratch / _SINGLE)
        return [_SINGLE]
    names, placed = [], {}
    for i, sizes in enumerate(shards):
        names.append(f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors")
        (scratch / str(i)).rename(scratch / names[-1])
        placed.update(dict.fromkeys(sizes, names[-1]))
    total = sum(sum(sizes.values()) for sizes in shards)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(placed.items()))}
    (scratch / _INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return [*names, _INDEX]


def _publish(scratch: Path, folder: Path, names: list[str]) -> None:
    """Move the finished files into ``folder``: the old model goes first, the file that makes the new one load last."""
    for old in [folder / _INDEX, *folder.glob("model*.safetensors")]:
        if old.name == _INDEX or _WEIGHT_FILE.fullmatch(old.name):
            old.unlink(missing_ok=True)
    for name in (_CONFIG, *names):
        (scratch / name).replace(folder / name)


def _parse_bytes(size: int | str) -> int:
    """Bytes from an int or a text such as ``5GB`` or ``300KB``."""
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", size)
        if match is None or match[2].upper() not in _UNITS:
            raise ValueError(f"max_shard_size must be bytes or a text such as '5GB', got {size!r}")
        size = int(float(match[1]) * _UNITS[match[2].upper()])
    if size <= 0:
        raise ValueError(f"max_shard_size must be positive, got {size}")
    return size
