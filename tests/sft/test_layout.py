"""Layouts are checked against model and batch before anything is started, and near ones that would do are named."""

import pytest

from nanopar_models import PhiMoEConfig
from nanopar_models.config import LongRope
from nanopar_sft.layout import Layout, explained, nearest_layouts, problem

MODEL = PhiMoEConfig(
    vocab_size=50,
    hidden_size=16,
    intermediate_size=12,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    num_local_experts=6,
    max_position_embeddings=64,
)


@pytest.mark.parametrize(
    ("layout", "why"),
    [
        (Layout(tp=3), "tp=3 does not divide the model's 4 attention heads"),
        (Layout(dp=4, ep=4), "ep=4 does not divide the model's 6 experts"),
        (Layout(dp=2, ep=3), "ep=3 x etp=1 does not divide dp=2 x cp=1 x tp=1 = 2 ranks"),
        (Layout(pp=8), "pp=8 x 1 stages on a rank need 8 modules, the model has 6: 3 layers, embedding, last norm and"),
        (Layout(tp=4, etp=4, sp=True), "sp=true needs sequences of at least tp=4 tokens, seq_len is 3"),
        (Layout(dp=8), "batch_size=12 is not divisible by dp=8 x dp_replicate=1 x microbatches=1 = 8"),
        (Layout(cp=2, tp=4, etp=4, cp_method="ulysses"), "cp=2 does not divide the 1 attention heads of a rank, as"),
        (Layout(tp=4, etp=4), None),
        (Layout(pp=2, dp=2, tp=2, ep=2, etp=2), None),
    ],
)
def test_what_a_model_does_not_admit(layout: Layout, why: str | None) -> None:
    found = problem(layout, MODEL, batch_size=12, seq_len=3)
    assert found is None if why is None else (found or "").startswith(why), found


def test_context_parallelism_within_the_original_length() -> None:
    import dataclasses

    rope = LongRope((1.0,) * 4, (2.0,) * 4, 1.0, 1.1, original_max_position_embeddings=32)
    long = dataclasses.replace(MODEL, rope_scaling=rope)
    assert problem(Layout(cp=2), long, 12, 32) is None
    assert (problem(Layout(cp=2), long, 12, 33) or "").startswith("cp=2: beyond 32 positions LongRoPE depends on")


def test_the_nearest_possible_layouts_are_named() -> None:
    text = explained(Layout(tp=4, etp=4, dp=2, ep=4), MODEL, 12, 16)
    assert text == (
        "ep=4 x etp=4 does not divide dp=2 x cp=1 x tp=4 = 8 ranks; possible with 8 ranks: dp=2 tp=4 ep=2, dp=2 tp=4, "
        "dp=2 tp=4 ep=2 etp=1"
    )
    for near in nearest_layouts(Layout(tp=4, etp=4, dp=2, ep=4), MODEL, 12, 16):
        assert near.ranks == 8
        assert problem(near, MODEL, 12, 16) is None
