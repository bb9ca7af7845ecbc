"""Training, evaluation, resuming and export of the app, against transformers and plain PyTorch."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import nanopar_core as core
import nanopar_models as models
import nanopar_zero as zero
from nanopar_core import testing, verify
from nanopar_models.loss import NextTokenLoss
from nanopar_sft import assemble, evaluate, export, generate, metrics, schedule, train
from nanopar_sft.batches import Batches
from nanopar_sft.config import Config
from nanopar_sft.errors import InputError
from nanopar_sft.report import Reporter

transformers = pytest.importorskip("transformers")

SMALL = [
    *("--steps", "5", "--batch-size", "8", "--train-rows", "64", "--eval-rows", "7", "--max-new-tokens", "6"),
    *("--warmup", "2", "--lr", "0.003", "--router-jitter-noise", "0", "--plot", "false"),
]


def config_for(model: Path | str, output_dir: Path, *more: str, ranks: int = 1) -> Config:
    return Config.parse(arguments_for(model, output_dir, *more)).resolve("train", ranks)


def arguments_for(model: Path | str, output_dir: Path, *more: str) -> list[str]:
    return [*SMALL, "--model", str(model), "--output-dir", str(output_dir), *more]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Phi-MoE with the built-in tokenizer, in Hugging Face form."""
    folder = tmp_path_factory.mktemp("model")
    chat = assemble.load_chat(Config.parse([]))
    shape = models.PhiMoEConfig.preset(
        "nano", vocab_size=len(chat.tokenizer), hidden_size=48, intermediate_size=32, num_hidden_layers=2, head_dim=16
    )
    model = models.PhiMoE(shape)
    model.init_weights(3)
    models.save(model, folder)
    chat.tokenizer.save_pretrained(folder)
    return folder


def on_rank(config: Config, output_dir: Path) -> dict[str, torch.Tensor]:
    """What ``train.run`` does, inside a running job: the weights at the end."""
    world = core.World(torch.distributed.get_rank(), torch.distributed.get_world_size(), 0, torch.device("cpu"))
    chat = assemble.load_chat(config)
    encoded = chat.encode(assemble.training_rows(config), config.seq_len)
    batches = Batches(encoded.examples, config.batch_size, seed=config.seed)
    model = assemble.model_to_train(config, chat)
    trainer = train.Trainer(config, world, model, chat, batches, [], config.steps or 0)
    with Reporter(output_dir, config.steps or 0, plot=False, enabled=world.rank == 0) as reporter:
        trainer.train(0, reporter)
    with zero.gathered(model):
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def reported(output_dir: Path) -> dict[str, Any]:
    """What the first rank, alone, has written of each step."""
    records = metrics.read(output_dir / metrics.METRICS)
    names = {"loss": "loss", "norm": "grad_norm", "tokens": "tokens"}
    return {name: [record[key] for record in records] for name, key in names.items()}


def by_transformers(config: Config) -> dict[str, Any]:
    """The same training in plain PyTorch with transformers' model: whole batch, rows one by one, stock AdamW."""
    model = transformers.PhimoeForCausalLM.from_pretrained(config.model, dtype=torch.float32)
    model.config.router_jitter_noise = 0.0
    for layer in model.model.layers:
        layer.mlp.router.router_jitter_noise = 0.0
    model.eval()  # deterministic routing; the model has no dropout
    encoded = assemble.load_chat(config).encode(assemble.training_rows(config), config.seq_len)
    batches = Batches(encoded.examples, config.batch_size, seed=config.seed)
    decayed = [p for name, p in model.named_parameters() if p.ndim > 1 and "embed_tokens" not in name]
    still = [p for name, p in model.named_parameters() if p.ndim == 1 or "embed_tokens" in name]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": still, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas)
    rates = [0.0015, 0.003, 0.003, 0.003 * (1 + math.cos(math.pi / 3)) / 2, 0.003 * (1 + math.cos(2 * math.pi / 3)) / 2]
    losses, norms, tokens = [], [], []
    for step in range(5):
        optimizer.zero_grad()
        rows = batches.batch(step)
        counted = sum(int((torch.tensor(row.labels)[1:] != -100).sum()) for row in rows)
        loss = torch.zeros(())
        for row in rows:
            ids, labels = torch.tensor(row.input_ids).long(), torch.tensor(row.labels).long()
            logits = model(ids[None]).logits[0, :-1]
            loss = loss + F.cross_entropy(logits, labels[1:], ignore_index=-100, reduction="sum") / counted
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip).item())
        for group in optimizer.param_groups:
            group["lr"] = rates[step]
        optimizer.step()
        losses.append(loss.item())
        tokens.append(counted)
    assert losses[0] - losses[-1] > 0.3  # it learns, so a comparison means something
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return {"loss": losses, "norm": norms, "tokens": tokens, "weights": weights}


# Adam divides by the gradient's own size, so rounding shows more in weights whose gradient is nearly zero.
TOLERANCE = {"loss": 2e-5, "norm": 2e-5, "weights": 1e-4}


@pytest.mark.parametrize(
    ("ranks", "stage", "microbatches", "recompute"),
    [
        (1, 0, 2, "false"),
        (2, 0, 2, "true"),
        (4, 0, 1, "false"),
        (4, 1, 1, "true"),
        (2, 2, 2, "false"),
        (2, 3, 2, "true"),
        (4, 3, 1, "false"),
    ],
)
def test_training_equals_transformers(
    model_dir: Path, tmp_path: Path, ranks: int, stage: int, microbatches: int, recompute: str
) -> None:
    more = ("--zero", str(stage), "--microbatches", str(microbatches), "--recompute", recompute)
    config = config_for(model_dir, tmp_path, *more, ranks=ranks)
    reference = by_transformers(config)
    weights = testing.run(ranks, on_rank, config, tmp_path)
    for name, own in weights[0].items():
        # The true gradient of a key's bias is zero (softmax does not see it), and Adam turns its rounding into steps:
        # only its copies are compared with each other.
        if name.endswith("k_proj.bias"):
            reference["weights"][name] = own
    results = [{**reported(tmp_path), "weights": of_rank} for of_rank in weights]
    testing.assert_parity(reference, results, micro_batches=microbatches, rtol=TOLERANCE)


def test_a_wrong_divisor_would_be_seen(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_for(model_dir, tmp_path)
    reference = by_transformers(config)
    del reference["weights"]
    right = Batches.label_count
    monkeypatch.setattr(Batches, "label_count", lambda self, step: right(self, step) + 1)
    torch.set_num_threads(1)
    train.run(config)
    report = verify.compare(reference, reported(tmp_path), rtol=2e-5)
    assert {f"{name}[{step}]" for name in reference for step in range(5)} == {d.name for d in report.differences}
    first = reference["tokens"][0]
    assert report.diagnosis[0].startswith(f"tokens[0]: {first + 1} instead of {first}: a micro-batch, or rows of one,")


def test_a_killed_run_resumes_exactly(model_dir: Path, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train.run(config_for(model_dir, whole, "--save-every", "3"))
    train.run(config_for(model_dir, parts, "--steps", "5", "--save-every", "3"))
    # As if it had been killed after step 3: the later records are there, the weights are not.
    for file in parts.glob("model*.safetensors"):
        file.unlink()
    train.run(config_for(model_dir, parts, "--steps", "5", "--save-every", "3", "--resume", "auto"))
    one, two = (metrics.read(folder / metrics.METRICS) for folder in (whole, parts))
    assert [record["step"] for record in two] == [1, 2, 3, 4, 5]
    assert [record["lr"] for record in one] == [record["lr"] for record in two]
    state, other = ({**reported(run), "weights": models.load(run).state_dict()} for run in (whole, parts))
    testing.assert_parity(state, other, rtol=0.0)
    lines = (parts / metrics.METRICS).read_text().splitlines()
    assert len(lines) == 5 + 2  # steps 4 and 5 were done twice; the last record of a step counts
    assert (parts / "checkpoints" / "step-000003").is_dir()


def test_export_of_a_checkpoint_is_the_model(model_dir: Path, tmp_path: Path) -> None:
    train.run(config_for(model_dir, tmp_path / "run", "--save-every", "5"))
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000005"
    export.run(Config.parse(["--resume", str(checkpoint), "--output-dir", str(tmp_path / "out")]))
    exported = transformers.PhimoeForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    saved = transformers.PhimoeForCausalLM.from_pretrained(tmp_path / "run").state_dict()
    assert exported.keys() == saved.keys()
    assert all(torch.equal(exported[name], saved[name]) for name in saved)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (
        tokenizer("Mia has 3 cards.")["input_ids"]
        == assemble.load_chat(Config.parse([])).tokenizer("Mia has 3 cards.")["input_ids"]
    )


def test_a_checkpoint_of_another_model_is_refused(model_dir: Path, tmp_path: Path) -> None:
    train.run(config_for(model_dir, tmp_path, "--steps", "3", "--save-every", "3"))
    with pytest.raises(InputError, match=r"step-000003: checkpoint .* (has shape|holds|has no)"):
        train.run(config_for("nano", tmp_path / "other", "--resume", str(tmp_path / "checkpoints" / "step-000003")))


def evaluate_on_rank(config: Config) -> tuple[evaluate.Result, list[str]]:
    chat = assemble.load_chat(config)
    rows = assemble.test_rows(config)
    parallel = assemble.build_parallel(config, assemble.model_to_answer(config, chat))
    assemble.answer_in(config, parallel, torch.device("cpu"))
    with parallel.whole():
        result = evaluate.evaluate(parallel, chat, rows, config, torch.device("cpu"))
        return result, evaluate.answer(parallel, chat, rows[:2], 6, torch.device("cpu"))


def test_evaluation_counts_every_row_once_whatever_the_ranks(model_dir: Path, tmp_path: Path) -> None:
    configs = {ranks: Config.parse(arguments_for(model_dir, tmp_path)).resolve("eval", ranks) for ranks in (1, 2, 3)}
    config = configs[1]
    results = {ranks: testing.run(ranks, evaluate_on_rank, configs[ranks]) for ranks in (1, 2, 3)}
    first = results[1][0][0]
    assert first.total == 7
    for outcome in results.values():
        for result, _ in outcome:
            assert (result.strict, result.flexible, result.total) == (first.strict, first.flexible, first.total)
    # The loss is that of transformers, row by row.
    model = transformers.PhimoeForCausalLM.from_pretrained(model_dir).eval()
    for layer in model.model.layers:
        layer.mlp.router.router_jitter_noise = 0.0
    encoded = assemble.load_chat(config).encode(assemble.test_rows(config), config.seq_len)
    total = 0.0
    for row in encoded.examples:
        logits = model(torch.tensor(row.input_ids).long()[None]).logits[0, :-1]
        total += F.cross_entropy(logits, torch.tensor(row.labels).long()[1:], ignore_index=-100, reduction="sum").item()
    counted = sum(row.label_count for row in encoded.examples)
    for outcome in results.values():
        testing.assert_parity({"loss": total / counted}, [{"loss": result.loss} for result, _ in outcome], rtol=1e-6)


def test_right_answers_are_counted(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_for(model_dir, tmp_path, "--eval-rows", "10")
    rows = assemble.test_rows(config)
    said = {row.prompt: row.answer for row in rows}
    wrong = {rows[0].prompt, rows[5].prompt}

    def answers(_model: object, _chat: object, batch: list[Any], *_: object) -> list[str]:
        return ["#### 123456" if row.prompt in wrong else said[row.prompt].replace("####", "so") for row in batch]

    monkeypatch.setattr(evaluate, "answer", answers)
    chat = assemble.load_chat(config)
    parallel = assemble.build_parallel(config, assemble.model_to_answer(config, chat))
    assemble.answer_in(config, parallel, torch.device("cpu"))
    with parallel.whole():
        result = evaluate.evaluate(parallel, chat, rows, config, torch.device("cpu"))
    assert (result.strict, result.flexible, result.total) == (0, 8, 10)


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_16_bits_train_near_fp32_and_are_saved(
    model_dir: Path, tmp_path: Path, precision: str, dtype: torch.dtype
) -> None:
    train.run(config_for(model_dir, tmp_path / "a", "--precision", precision))
    train.run(config_for(model_dir, tmp_path / "b"))
    one, two = (reported(tmp_path / name)["loss"] for name in "ab")
    testing.assert_parity({"loss": two}, {"loss": one}, rtol=2e-2)
    assert next(models.load(tmp_path / "a").parameters()).dtype is dtype


def test_frozen_parameters_stay(model_dir: Path, tmp_path: Path) -> None:
    train.run(config_for(model_dir, tmp_path, "--freeze", "model.embed_tokens.*,*.router.*"))
    before, after = models.load(model_dir).state_dict(), models.load(tmp_path).state_dict()
    for name in before:
        assert torch.equal(before[name], after[name]) == ("embed_tokens" in name or "router" in name), name


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_step_that_is_not_finite_is_skipped(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    seen = []
    right = NextTokenLoss.forward

    def forward(self: NextTokenLoss, logits: torch.Tensor, labels: torch.Tensor, counted: int) -> torch.Tensor:
        loss = right(self, logits, labels, counted)
        seen.extend([1] if counted > 1 else [])  # of training
        return loss * math.nan if counted > 1 and len(seen) == 2 else loss

    monkeypatch.setattr(NextTokenLoss, "forward", forward)
    train.run(config_for(model_dir, tmp_path))
    records = metrics.read(tmp_path / metrics.METRICS)
    assert [record["skipped"] for record in records] == [False, True, False, False, False]
    assert records[1]["loss"] is None
    assert all(math.isfinite(record["loss"]) for record in records if not record["skipped"])


def nan_on_rank(config: Config, output_dir: Path) -> dict[str, torch.Tensor]:
    """Training in which the last stage's loss is NaN in the second step."""
    right, calls = NextTokenLoss.forward, []

    def forward(self: NextTokenLoss, logits: torch.Tensor, labels: torch.Tensor, counted: int) -> torch.Tensor:
        loss = right(self, logits, labels, counted)
        calls.append(1)
        return loss * math.nan if len(calls) in (3, 4) else loss  # two micro-batches a step

    NextTokenLoss.forward = forward  # type: ignore[method-assign]
    world = core.World(torch.distributed.get_rank(), 2, 0, torch.device("cpu"))
    chat = assemble.load_chat(config)
    _, batches = assemble.training_batches(config, chat)
    trainer = train.Trainer(config, world, assemble.model_to_train(config, chat), chat, batches, [], 5)
    before = {name: p.detach().clone() for name, p in trainer.parallel.part.named_parameters()}
    with Reporter(output_dir, 5, plot=False, enabled=world.rank == 0) as reporter, core.ledger() as book:
        reporter.step(trainer.step(1, book))
        after = {name: p.detach().clone() for name, p in trainer.parallel.part.named_parameters()}
        reporter.step(trainer.step(2, book))
        for name, parameter in trainer.parallel.part.named_parameters():
            assert not torch.equal(before[name], after[name]) or "experts" in name or "router" in name, name
            assert torch.equal(after[name], parameter), name
        reporter.step(trainer.step(3, book))
    return {}


def test_a_step_that_is_not_finite_is_skipped_by_all_stages(model_dir: Path, tmp_path: Path) -> None:
    config = config_for(model_dir, tmp_path, "--pp", "2", "--microbatches", "2", "--warmup", "0", ranks=2)
    testing.run(2, nan_on_rank, config, tmp_path)
    records = metrics.read(tmp_path / metrics.METRICS)
    assert [record["skipped"] for record in records] == [False, True, False]
    assert records[1]["grad_norm"] is None


def test_metrics_and_output(model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_for(model_dir, tmp_path, "--log", "tensorboard", "--plot", "true")
    train.run(config)
    records = metrics.read(tmp_path / metrics.METRICS)
    chat = assemble.load_chat(config)
    encoded = chat.encode(assemble.training_rows(config), config.seq_len)
    batches = Batches(encoded.examples, 8, seed=0)
    assert [record["tokens"] for record in records] == [
        sum(example.label_count for example in batches.batch(step)) for step in range(5)
    ]
    assert records[0]["lr"] == pytest.approx(0.0015)
    assert records[0]["collectives"] == {}  # one rank sends nothing
    assert records[0]["peak_memory_bytes"] > 2**20
    assert Config.parse(["--config", str(tmp_path / "config.yaml")]).model == str(model_dir)
    assert (tmp_path / "loss.png").stat().st_size > 1000
    assert list((tmp_path / "tensorboard").iterdir())
    evaluations = metrics.read(tmp_path / metrics.EVALUATIONS)
    assert [record["step"] for record in evaluations] == [0, 5]
    assert evaluations[0]["total"] == 7
    assert json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"] == sorted(chat.stop_ids)
    assert "model saved in" in capsys.readouterr().out


def test_generate_prints_what_transformers_generates(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    question = "Mia has 3 cards. Tom gives Mia 4 cards. How many cards does Mia have?"
    config = config_for(model_dir, tmp_path, "--prompt", question, "--max-new-tokens", "12")
    generate.run(config)
    printed = capsys.readouterr().out
    model = transformers.PhimoeForCausalLM.from_pretrained(model_dir).eval()
    for layer in model.model.layers:
        layer.mlp.router.router_jitter_noise = 0.0
    chat = assemble.load_chat(config)
    ids = chat.tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )["input_ids"]
    new = model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=sorted(chat.stop_ids), pad_token_id=0)
    assert printed.strip() == chat.decode(new[0, ids.shape[1] :].tolist()).strip()
    assert printed.strip()


@pytest.mark.parametrize(
    ("name", "step", "expected"),
    [
        ("cosine", 1, 0.5),
        ("cosine", 2, 1.0),
        ("cosine", 3, 1.0),
        ("cosine", 7, 0.5),
        ("linear", 7, 0.5),
        ("linear", 10, 0.125),
        ("constant", 10, 1.0),
    ],
)
def test_learning_rate(name: str, step: int, expected: float) -> None:
    config = Config.parse(["--lr", "1", "--warmup", "2", "--lr-schedule", name])
    assert schedule.learning_rate(config, step, 10) == pytest.approx(expected)


def test_weight_decay_spares_norms_biases_and_embeddings() -> None:
    config = Config.parse([])
    model = assemble.build_model(config, assemble.load_chat(config))
    decayed, still = assemble.parameter_groups(model, 0.1)
    assert len(decayed["params"]) + len(still["params"]) == len(list(model.parameters()))
    assert all("norm" in name or "embed_tokens" in name or name.endswith("bias") for name in still["params"])
    assert not any("norm" in name or "embed" in name or name.endswith("bias") for name in decayed["params"])
    assert (decayed["weight_decay"], still["weight_decay"]) == (0.1, 0.0)
