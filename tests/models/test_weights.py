"""Model directories: both directions with transformers, strict errors, nothing half-written."""

import json
import struct

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import nanopar_models as models
from nanopar_models import weights


@pytest.fixture
def saved(make_reference, tmp_path):
    """A sharded directory written by transformers, and the reference it came from."""
    reference = make_reference()
    folder = tmp_path / "hub"
    reference.save_pretrained(folder, max_shard_size="300KB")
    assert len(list(folder.glob("*.safetensors"))) > 3
    return reference, folder


def assert_same(ours: models.PhiMoE, reference: torch.nn.Module) -> None:
    expected = reference.state_dict()
    assert set(ours.state_dict()) == set(expected)
    for name, tensor in ours.state_dict().items():
        assert tensor.dtype == expected[name].dtype and torch.equal(tensor, expected[name]), name


def test_load_what_transformers_wrote(saved):
    assert_same(models.load(saved[1]), saved[0])
    assert all(parameter.requires_grad for parameter in models.load(str(saved[1])).parameters())


def test_load_one_unsharded_file(make_reference, tmp_path):
    reference = make_reference()
    reference.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").is_file()
    assert_same(models.load(tmp_path), reference)


@pytest.mark.parametrize("size", ["300KB", "5GB"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformers_loads_what_we_wrote(saved, tmp_path, size, dtype):
    transformers = pytest.importorskip("transformers")
    ours = models.load(saved[1], dtype=dtype)
    models.save(ours, tmp_path / "ours", max_shard_size=size)
    theirs, report = transformers.PhimoeForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    assert next(theirs.parameters()).dtype == dtype
    assert_same(ours, theirs)
    assert_same(models.load(tmp_path / "ours"), theirs)


def test_files_have_the_hubs_names(saved, tmp_path):
    models.save(models.load(saved[1]), tmp_path / "ours", max_shard_size="300KB")
    names, theirs = (
        set(json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"])
        for folder in (tmp_path / "ours", saved[1])
    )
    assert names == theirs
    stem = "model.layers.1.block_sparse_moe"
    assert {f"{stem}.gate.weight", f"{stem}.experts.7.w1.weight", f"{stem}.experts.7.w2.weight"} <= names
    for file in (tmp_path / "ours").glob("*.safetensors"):
        with safe_open(file, "pt") as handle:
            assert sum(handle.get_tensor(key).nbytes for key in handle.keys()) <= 300_000  # noqa: SIM118
            assert handle.metadata() == {"format": "pt"}


def test_names_in_memory_are_read_too(saved, tmp_path):
    reference, folder = saved
    save_file({k: v.contiguous() for k, v in reference.state_dict().items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    assert_same(models.load(tmp_path), reference)


def test_dtype_and_changes(saved):
    model = models.load(saved[1], dtype=torch.float64, router_noise=True)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}
    assert model.config.router_noise
    expected = saved[0].state_dict()
    assert all(torch.equal(v, expected[k].double()) for k, v in model.state_dict().items())


def test_save_from_an_iterator_holds_one_shard(saved, tmp_path, monkeypatch):
    model = models.load(saved[1])
    sizes = []

    def watch(tensors, file, metadata=None):
        sizes.append(sum(tensor.nbytes for tensor in tensors.values()))
        save_file(tensors, file, metadata=metadata)

    monkeypatch.setattr(weights, "save_file", watch)
    gathered = ((name, tensor) for name, tensor in model.state_dict().items())
    models.save_state_dict(gathered, model.config, tmp_path / "out", max_shard_size=200_000)
    assert len(sizes) > 5 and max(sizes) <= 200_000
    assert_same(models.load(tmp_path / "out"), saved[0])


def edit_shard(folder, name, change):
    """Rewrite the shard that holds ``name`` after ``change(tensors)``; returns its path."""
    file = folder / json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"][name]
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    return file


EXPERT = "model.layers.1.block_sparse_moe.experts.3.w2.weight"


def test_missing_tensor(saved):
    file = edit_shard(saved[1], EXPERT, lambda tensors: tensors.pop(EXPERT))
    with pytest.raises(ValueError, match=rf"{file.name} lacks {EXPERT}"):
        models.load(saved[1])
    index = json.loads((saved[1] / "model.safetensors.index.json").read_text())
    del index["weight_map"][EXPERT]
    (saved[1] / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=rf"hub lacks {EXPERT}"):
        models.load(saved[1])


def test_unexpected_tensor(saved):
    index_file = saved[1] / "model.safetensors.index.json"
    index = json.loads(index_file.read_text())
    file = edit_shard(saved[1], EXPERT, lambda tensors: tensors.update(extra=torch.zeros(1)))
    with pytest.raises(ValueError, match=rf"{file.name} holds extra"):
        models.load(saved[1])
    index["weight_map"]["extra"] = file.name
    index_file.write_text(json.dumps(index))
    with pytest.raises(ValueError, match=rf"{file.name} holds unexpected extra"):
        models.load(saved[1])


def test_misshaped_tensor(saved):
    file = edit_shard(saved[1], EXPERT, lambda tensors: tensors.update({EXPERT: tensors[EXPERT].t().contiguous()}))
    message = rf"{file.name}: {EXPERT} has shape \[32, 96\], config.json needs \[96, 32\]"
    with pytest.raises(ValueError, match=message):
        models.load(saved[1])


def test_quantised_tensor(saved):
    file = edit_shard(saved[1], EXPERT, lambda tensors: tensors.update({EXPERT: tensors[EXPERT].to(torch.int8)}))
    with pytest.raises(ValueError, match=rf"{file.name}: {EXPERT} is stored as I8"):
        models.load(saved[1])


def test_truncated_and_garbled_files(saved):
    file = next(saved[1].glob("*.safetensors"))
    content = file.read_bytes()
    for damaged in (content[:-5], content[:4], b"", b"garbage" * 100, struct.pack("<Q", 2**62) + content[8:]):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=rf"{file.name} cannot be read as safetensors"):
            models.load(saved[1])
    file.unlink()
    with pytest.raises(ValueError, match=rf"{file.name} cannot be read as safetensors"):
        models.load(saved[1])


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "sub/x.safetensors", "..", "", "..\\x"])
def test_index_that_points_outside(saved, name):
    index_file = saved[1] / "model.safetensors.index.json"
    index = json.loads(index_file.read_text())
    index["weight_map"][EXPERT] = name
    index_file.write_text(json.dumps(index))
    with pytest.raises(ValueError, match="points outside its directory"):
        models.load(saved[1])


@pytest.mark.parametrize("text", ["", "[]", "{", '{"weight_map": 3}', '{"weight_map": {"a": 1}}', "[" * 100_000])
def test_damaged_index(saved, text):
    (saved[1] / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json"):
        models.load(saved[1])


@pytest.mark.parametrize("content", [b"{", b"[1]", b'{"model_type": "llama"}', b"\xff\xfe"])
def test_damaged_config(saved, content):
    (saved[1] / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"hub.config\.json"):
        models.load(saved[1])


def test_no_model_there(tmp_path):
    with pytest.raises(ValueError, match=r"config\.json does not exist"):
        models.load(tmp_path)
    with pytest.raises(ValueError, match="neither a directory nor a hub id"):
        models.load(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text(json.dumps(models.PhiMoEConfig.preset("nano").to_dict()))
    with pytest.raises(ValueError, match=r"has neither model\.safetensors nor model\.safetensors\.index\.json"):
        models.load(tmp_path)


def test_hub_id_without_network():
    with pytest.raises(ValueError, match="there is no directory nobody/no-such-model, and the hub did not deliver"):
        models.load("nobody/no-such-model")


def test_a_failed_save_leaves_the_old_model(saved, tmp_path):
    model = models.load(saved[1])
    models.save(model, tmp_path / "out")
    before = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    state = model.state_dict()

    def broken():
        for i, pair in enumerate(state.items()):
            if i == 20:
                raise RuntimeError("rank 1 died")
            yield pair

    with pytest.raises(RuntimeError, match="rank 1 died"):
        models.save_state_dict(broken(), model.config, tmp_path / "out", max_shard_size="100KB")
    assert {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()} == before


def test_save_replaces_an_older_model_and_keeps_other_files(saved, tmp_path):
    model = models.load(saved[1])
    (tmp_path / "tokenizer.json").write_text("{}")
    models.save(model, tmp_path, max_shard_size="300KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    models.save(model, tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir() if file.is_file()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert not list(tmp_path.glob(".saving-*"))
    assert_same(models.load(tmp_path), saved[0])


def test_save_refuses_incomplete_weights(saved, tmp_path):
    model = models.load(saved[1])
    state = model.state_dict()
    del state["lm_head.bias"]
    with pytest.raises(ValueError, match=r"the weights lack lm_head\.bias"):
        models.save_state_dict(state, model.config, tmp_path / "out")
    with pytest.raises(ValueError, match=r"lm_head\.bias has shape \[3\], its config needs \[320\]"):
        models.save_state_dict({"lm_head.bias": torch.zeros(3)}, model.config, tmp_path / "out")
    with pytest.raises(ValueError, match="other is not a parameter of this model"):
        models.save_state_dict({"other": torch.zeros(3)}, model.config, tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())
    with pytest.raises(ValueError, match="max_shard_size must be bytes or a text such as '5GB', got 'big'"):
        models.save(model, tmp_path / "out", max_shard_size="big")


def test_loading_holds_the_model_once(tmp_path):
    """Peak memory of a load, measured in a process of its own: the model's size and little more."""
    import resource
    import subprocess
    import sys

    config = models.PhiMoEConfig.preset("nano", vocab_size=4096, hidden_size=512, intermediate_size=1024)
    models.save(models.PhiMoE(config), tmp_path, max_shard_size="20MB")
    size = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    assert size > 150e6
    code = (
        "import resource, sys, nanopar_models as m\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024\n"
        "before = peak(); model = m.load(sys.argv[1]); print(peak() - before)"
    )
    assert resource is not None
    out = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True).stdout
    assert int(out) < 1.3 * size
