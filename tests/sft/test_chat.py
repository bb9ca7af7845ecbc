from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from nanopar_sft.chat import Chat, Example
from nanopar_sft.errors import InputError
from nanopar_sft.rows import Message, Row, load_rows
from nanopar_sft.show import render
from nanopar_sft.tokenizer import PHI_TEMPLATE, builtin_tokenizer, load_tokenizer

SHARED = Path(__file__).parents[2].parent / "shared" / "data"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="needs ../shared/data")

# ChatML as SmolLM2 writes it: a system turn of its own, and a line break behind every end of turn.
CHATML = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}<|im_start|>system\nBe nice<|im_end|>\n{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As Phi-3 on the hub: an end of text behind a conversation that is not to be continued.
PHI_WITH_EOS = PHI_TEMPLATE.replace("{% endif %}", "{% else %}{{ eos_token }}{% endif %}")
# As Llama 2: the end of text ends a turn.
LLAMA = (
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'].strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
# No chat token at all.
PLAIN = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
# Thinks before the last answer only, and so writes a turn otherwise once another follows.
THINKING = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if loop.last and message['role'] == 'assistant' %}{{ '<think>\n' }}{% endif %}"
    "{{ message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def characters(template: str, special: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    """A tokenizer of single characters, so that expectations can be read; special tokens as given and </s>."""
    alphabet = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ[]/:.? \n<>|0123456789_"
    tokenizer = Tokenizer(models.WordLevel({character: i for i, character in enumerate(alphabet)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([*special, "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", chat_template=template)


def row(*turns: str) -> Row:
    """User and assistant in turn."""
    return Row(tuple(Message(("user", "assistant")[i % 2], turn) for i, turn in enumerate(turns)), "here:1")


def encode_one(chat: Chat, one: Row) -> tuple[str, str]:
    """What a row reads as, and which of its tokens are learned (the others as dots)."""
    [example] = chat.encode([one], 10_000).examples
    tokens = chat.tokenizer.convert_ids_to_tokens(example.input_ids.tolist())
    learned = [token if label >= 0 else "." for token, label in zip(tokens, example.labels, strict=True)]
    assert all(label in (-100, index) for index, label in zip(example.input_ids, example.labels, strict=True))
    return "".join(tokens), "".join(learned)


IM = ("<|im_start|>", "<|im_end|>")
ROLES = ("<|user|>", "<|assistant|>", "<|end|>")


@pytest.mark.parametrize(
    ("template", "special", "reads", "learned", "stops"),
    [
        (PHI_TEMPLATE, ROLES, "<|user|>\nHi?<|end|>\n<|assistant|>\n", "Yes<|end|>", ("<|end|>", "</s>")),
        (PHI_WITH_EOS, ROLES, "<|user|>\nHi?<|end|>\n<|assistant|>\n", "Yes<|end|>", ("<|end|>", "</s>")),
        (
            CHATML,
            IM,
            "<|im_start|>system\nBe nice<|im_end|>\n<|im_start|>user\nHi?<|im_end|>\n<|im_start|>assistant\n",
            "Yes<|im_end|>",
            ("<|im_end|>", "</s>"),
        ),
        (LLAMA, (), "[INST] Hi? [/INST]", " Yes </s>", ("</s>",)),
        (PLAIN, (), "user: Hi?\nassistant: ", "Yes\n</s>", ("</s>",)),
        (
            THINKING,
            IM,
            "<|im_start|>user\nHi?<|im_end|>\n<|im_start|>assistant\n",
            "<think>\nYes<|im_end|>",
            ("<|im_end|>", "</s>"),
        ),
    ],
)
def test_only_what_the_assistant_writes_is_learned(
    template: str, special: tuple[str, ...], reads: str, learned: str, stops: tuple[str, ...]
) -> None:
    tokenizer = characters(template, special)
    chat = Chat(tokenizer)
    text, kept = encode_one(chat, row("Hi?", "Yes"))
    assert text == reads + learned
    assert kept.lstrip(".") == learned
    assert "." not in kept.lstrip(".")
    assert chat.stop_ids == set(tokenizer.convert_tokens_to_ids(list(stops)))
    prompt = chat.encode_prompt(row("Hi?", "Yes").prompt)
    assert "".join(tokenizer.convert_ids_to_tokens(prompt)) == reads


@pytest.mark.parametrize(
    ("template", "special", "learned"),
    [
        (PHI_TEMPLATE, ROLES, ["Hello<|end|>", "So long<|end|>"]),
        (CHATML, IM, ["Hello<|im_end|>", "So long<|im_end|>"]),
        (LLAMA, (), [" Hello </s>", " So long </s>"]),
        (PLAIN, (), ["Hello", "So long\n</s>"]),
        (THINKING, IM, ["Hello<|im_end|>", "<think>\nSo long<|im_end|>"]),
    ],
)
def test_every_assistant_turn_is_learned(template: str, special: tuple[str, ...], learned: list[str]) -> None:
    _, kept = encode_one(Chat(characters(template, special)), row("Hi", "Hello", "Bye", "So long"))
    assert [part for part in kept.split(".") if part] == learned


def test_a_system_turn_is_read_and_not_learned() -> None:
    messages = (Message("system", "Sum up"), *row("Hi", "Yes").messages)
    text, kept = encode_one(Chat(characters(CHATML, IM)), Row(messages, "here:1"))
    assert text.startswith("<|im_start|>system\nSum up<|im_end|>")
    assert kept.strip(".") == "Yes<|im_end|>"


def test_an_answer_that_also_stands_in_the_question() -> None:
    _, kept = encode_one(Chat(characters(PHI_TEMPLATE, ROLES)), row("a", "a", "a", "a"))
    assert [part for part in kept.split(".") if part] == ["a<|end|>", "a<|end|>"]


def test_a_template_that_drops_the_answer_is_named() -> None:
    template = PHI_TEMPLATE.replace("message['content']", "message['content'].replace('secret', '')")
    with pytest.raises(InputError, match="here:1: the chat template does not write"):
        Chat(characters(template, ROLES)).encode([row("Hi", "secret")], 100)


def test_a_tokenizer_without_any_end() -> None:
    tokenizer = characters(PLAIN)
    tokenizer.eos_token = None
    with pytest.raises(InputError, match="answers need an end"):
        Chat(tokenizer)


@settings(deadline=None)
@given(st.text("abc\n .", min_size=1).filter(str.strip), st.text("abc\n .", min_size=1).filter(str.strip))
def test_labels_spell_the_answer_and_the_prompt_is_what_generation_starts_from(question: str, answer: str) -> None:
    for template, special, end in ((PHI_TEMPLATE, ROLES, "<|end|>"), (CHATML, IM, "<|im_end|>")):
        chat = Chat(characters(template, special))
        [example] = chat.encode([row(question, answer)], 10_000).examples
        learned = example.labels != -100
        first = int(learned.argmax())
        assert learned[first:].all()
        assert "".join(chat.tokenizer.convert_ids_to_tokens(example.input_ids[first:].tolist())) == answer + end
        assert example.input_ids[:first].tolist() == chat.encode_prompt(row(question, answer).prompt)


def test_rows_that_do_not_fit_are_left_out_whole_and_counted() -> None:
    chat = Chat(characters(PHI_TEMPLATE, ROLES))
    rows = [row("Hi", "a" * length) for length in (1, 50, 3, 4)]
    lengths = [8 + length + 1 for length in (1, 50, 3, 4)]  # user \n H i end \n assistant \n, and end
    encoded = chat.encode(rows, lengths[2])
    assert [len(example.input_ids) for example in encoded.examples] == [lengths[0], lengths[2]]
    assert (encoded.too_long, encoded.longest) == (2, lengths[1])
    assert all(example.labels[-1] == chat.end_of_turn for example in encoded.examples)
    with pytest.raises(InputError, match=f"seq_len 5: none of 4 rows fits, the shortest has {lengths[0]} tokens"):
        chat.encode(rows, 5)


def test_decode_ends_at_the_first_stop_token() -> None:
    chat = Chat(builtin_tokenizer())
    ids = chat.tokenizer("3 + 4 = 7\n#### 7<|end|>\n9<|endoftext|>").input_ids
    assert chat.decode(ids) == "3 + 4 = 7\n#### 7"
    assert chat.decode(ids[:5]) == "3 + 4 = 7"


def test_synthetic_rows_with_the_builtin_tokenizer() -> None:
    chat = Chat(builtin_tokenizer())
    rows = load_rows("synthetic", "test", count=200)
    for one, example in zip(rows, chat.encode(rows, 512).examples, strict=True):
        learned = example.labels[example.labels >= 0]
        assert chat.tokenizer.decode(learned) == f"{one.answer}<|end|>"
        assert chat.tokenizer.decode(example.input_ids[: -len(learned)]) == (
            f"<|user|>{one.prompt[0].content}<|end|><|assistant|>"
        )


def test_an_example_is_shown_with_its_mask(capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = builtin_tokenizer()
    ids = np.array(tokenizer("<|user|>\nMia has 12 cards.<|end|>\n<|assistant|>\n3\n#### 7<|end|>").input_ids, np.int32)
    labels = np.where(np.arange(len(ids)) >= 8, ids, -100).astype(np.int32)
    text = render(Example(ids, labels), tokenizer)
    assert text.plain == "<|user|>|Mia| has| 12| cards|.|<|end|>|<|assistant|>|[[3|\\n\n|####| 7|<|end|>]]"
    styles = {text.plain[span.start : span.end]: span.style for span in text.spans}
    assert (styles["Mia"], styles["3"]) == ("dim", "bold green")
    Console(width=200).print(text)
    assert capsys.readouterr().out == text.plain + "\n"  # no colour codes in a pipe


def test_the_mask_of_two_turns_is_shown_apart() -> None:
    tokenizer = builtin_tokenizer()
    ids = np.array(tokenizer("1 2 3 4").input_ids, np.int32)
    assert render(Example(ids, np.array([-100, 1, -100, 1])), tokenizer).plain == "1|[[2]]|3|[[4]]"


@needs_shared
def test_a_gsm8k_row_in_phis_tokens() -> None:
    chat = Chat(load_tokenizer(str(SHARED / "phi3_tokenizer")))
    assert (chat.end_of_turn, chat.stop_ids) == (32007, {32000, 32007})
    one = load_rows(str(SHARED / "gsm8k" / "train.jsonl"), count=1)[0]
    [example] = chat.encode([one], 512).examples
    question = chat.tokenizer(one.prompt[0].content).input_ids
    answer = chat.tokenizer(one.answer).input_ids
    assert example.input_ids.tolist() == [32010, *question, 32007, 32001, *answer, 32007]
    assert example.labels.tolist() == [-100] * (len(question) + 3) + [*answer, 32007]


@needs_shared
def test_gsm8k_statistics() -> None:
    """The figures of all 7,473 rows, counted once with another program."""
    chat = Chat(load_tokenizer(str(SHARED / "phi3_tokenizer")))
    encoded = chat.encode(load_rows(str(SHARED / "gsm8k" / "train.jsonl")), 512)
    lengths = np.array([len(example.input_ids) for example in encoded.examples])
    answers = np.array([example.label_count for example in encoded.examples])
    assert (len(lengths), encoded.too_long, encoded.longest) == (7473, 0, 499)
    assert (lengths.sum(), round(lengths.mean()), np.median(lengths)) == (1_254_488, 168, 156)
    assert [round(np.percentile(lengths, percent)) for percent in (95, 99)] == [284, 351]
    assert (round((lengths > 96).mean(), 3), round((lengths > 256).mean(), 3)) == (0.918, 0.091)
    assert (answers.max(), (lengths - answers).max()) == (364, 242)
