import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from nanopar_sft.errors import InputError
from nanopar_sft.rows import CALCULATOR_MARK
from nanopar_sft.synthetic import make_problems
from nanopar_sft.tokenizer import builtin_tokenizer, load_tokenizer

PHI = Path(__file__).parents[2].parent / "shared" / "data" / "phi3_tokenizer"
TOKENIZER = builtin_tokenizer()


def texts() -> list[str]:
    problems = [row for split in ("train", "test") for row in make_problems(split, seed=0, count=2000)]
    return [row.question for row in problems] + [CALCULATOR_MARK.sub("", row.answer) for row in problems]


def test_tokens_of_a_problem() -> None:
    ids = TOKENIZER("Mia has 134 cards.\n#### 34, 05").input_ids
    assert TOKENIZER.convert_ids_to_tokens(ids) == [
        *"Mia has 13 4 cards . | #### 34 , 05".replace("|", "\n").split(" ")
    ]


def test_every_problem_comes_back_exactly_and_without_unknown_words() -> None:
    for text in texts():
        ids = TOKENIZER(text).input_ids
        assert TOKENIZER.decode(ids) == text
        assert TOKENIZER.unk_token_id not in ids


def test_vocabulary_is_small_and_ids_are_dense() -> None:
    assert len(TOKENIZER) <= 192
    assert sorted(TOKENIZER.get_vocab().values()) == list(range(len(TOKENIZER)))


def test_chat_template_is_phis() -> None:
    turns = [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": "#### 7"}]
    assert TOKENIZER.apply_chat_template(turns, tokenize=False) == (
        "<|user|>\nHow many?<|end|>\n<|assistant|>\n#### 7<|end|>\n"
    )
    assert TOKENIZER.apply_chat_template(turns[:1], tokenize=False, add_generation_prompt=True) == (
        "<|user|>\nHow many?<|end|>\n<|assistant|>\n"
    )


def test_role_tokens_swallow_their_line_break() -> None:
    ids = TOKENIZER("<|user|>\nHow many?<|end|>\n<|assistant|>\n7<|end|>\n").input_ids
    assert TOKENIZER.convert_ids_to_tokens(ids) == (
        ["<|user|>", "How", "many", "?", "<|end|>", "<|assistant|>", "7", "<|end|>"]
    )


@given(st.text())
def test_any_text_is_encoded_and_decoded(text: str) -> None:
    ids = TOKENIZER(text).input_ids
    assert isinstance(TOKENIZER.decode(ids), str)
    assert all(0 <= index < len(TOKENIZER) for index in ids)


def test_unseen_words_are_unknown_and_known_ones_are_kept() -> None:
    assert TOKENIZER.decode(TOKENIZER("Zoe has 12 kiwis,  you see?").input_ids) == "<unk> has 12 <unk>, <unk> <unk>?"


def test_saved_it_loads_as_any_hugging_face_tokenizer(tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.get_vocab() == TOKENIZER.get_vocab()
    assert (loaded.eos_token, loaded.pad_token, loaded.unk_token) == ("<|endoftext|>", "<|endoftext|>", "<unk>")
    assert loaded.chat_template == TOKENIZER.chat_template
    for text in texts()[::50]:
        assert loaded(text).input_ids == TOKENIZER(text).input_ids
        assert loaded.decode(loaded(text).input_ids) == text


def test_load_builtin_by_name() -> None:
    assert load_tokenizer("builtin").get_vocab() == TOKENIZER.get_vocab()


def plain_tokenizer(folder: Path, special: list[str], **options: str) -> Path:
    """A tokenizer directory without a chat template."""
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "hi": 1}, unk_token="<unk>"))
    tokenizer.add_special_tokens(special)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options).save_pretrained(folder)
    return folder


def test_phis_chat_tokens_bring_phis_template(tmp_path: Path) -> None:
    special = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|endoftext|>"]
    loaded = load_tokenizer(str(plain_tokenizer(tmp_path, special, eos_token="<|endoftext|>")))
    assert loaded.chat_template == TOKENIZER.chat_template
    assert loaded.pad_token == "<|endoftext|>"


def test_a_tokenizer_without_template_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no chat template"):
        load_tokenizer(str(plain_tokenizer(tmp_path, ["</s>"], eos_token="</s>")))


def test_a_directory_without_tokenizer_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "phimoe"}))
    with pytest.raises(InputError, match="no tokenizer in") as caught:
        load_tokenizer(str(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(not PHI.is_dir(), reason="needs ../shared/data/phi3_tokenizer")
def test_phi3_tokenizer_gets_phis_template() -> None:
    assert load_tokenizer(str(PHI)).chat_template == TOKENIZER.chat_template
