import json
from fractions import Fraction
from pathlib import Path

import pytest

from nanopar_sft.answers import commonest_answer_share, flexible_answer, reference_answer, score, strict_answer

GSM8K = Path(__file__).parents[2].parent / "shared" / "data" / "gsm8k"

WITH_MARK = {
    "#### 72": 72,
    "so 3 + 4 = 7.\n#### 7": 7,
    "####7": 7,
    "####   7": 7,
    "#### 18.": 18,
    "#### 18.00": 18,
    "#### 2.50": Fraction(5, 2),
    "#### .5": Fraction(1, 2),
    "#### 3/4": Fraction(3, 4),
    "#### 1,450": 1450,
    "#### 1,450,000.": 1450000,
    "#### -10": -10,
    "#### - 10": -10,
    "#### +10": 10,
    "#### \u221210": -10,
    "#### \uff0d10": -10,
    "#### $18": 18,
    "#### $ 18": 18,
    "#### $-5": -5,
    "#### -$5": -5,
    "#### \u2212$1,200.50": Fraction(-2401, 2),
    "#### \u20ac12": 12,
    "#### \u00a312": 12,
    "#### \\$12": 12,
    "#### **42**": 42,
    "**#### 42**": 42,
    "#### **$42**": 42,
    "#### `42`": 42,
    "#### 12 apples": 12,
    "#### 50%": 50,
    "#### 007": 7,
    "#### 18<|end|>\n#### 19": 18,
    "#### 18</s> 19": 18,
    "#### 18\n#### 19": 18,
    "#### Step two\n1 + 1 = 2\n#### 2": 2,
}

WITHOUT_MARK = {
    "The answer is 72.": 72,
    "The answer is $1,450.": 1450,
    "That makes 10-3": 3,
    "That makes 10 - 3": 3,
    "It is -3": -3,
    "It is -$3.50": Fraction(-7, 2),
    "It is $-3": -3,
    "It is \u22123": -3,
    "It is **-3**.": -3,
    "between 3,4": 4,
    "1,2345": 2345,
    "half: 1/2": Fraction(1, 2),
    "3 of 7<|im_end|> 8": 7,
    "7 of <3": 3,
}


@pytest.mark.parametrize(("text", "value"), WITH_MARK.items())
def test_number_behind_the_mark(text: str, value: Fraction) -> None:
    assert strict_answer(text) == value


@pytest.mark.parametrize(("text", "value"), WITHOUT_MARK.items())
def test_last_number_needs_no_mark_and_is_not_strict(text: str, value: Fraction) -> None:
    assert flexible_answer(text) == value
    assert strict_answer(text) is None


@pytest.mark.parametrize(
    "text", ["", "no number", "####", "#### many", "####\n5", "#### 1/0", "<|end|>#### 5", "#### " + "9" * 5000]
)
def test_no_number_behind_the_mark(text: str) -> None:
    assert strict_answer(text) is None


@pytest.mark.parametrize("text", ["", "none at all", "<|end|>5", "1/0", "9" * 5000])
def test_no_number_at_all(text: str) -> None:
    assert flexible_answer(text) is None


def test_flexible_takes_the_last_number_and_strict_the_marked_one() -> None:
    text = "#### 5\nBut 6 would do."
    assert (strict_answer(text), flexible_answer(text)) == (5, 6)


@pytest.mark.parametrize(
    ("completion", "reference", "expected"),
    [
        ("#### 18.00", "9 * 2 = 18\n#### 18", (True, True)),
        ("It is $18.", "#### 18", (False, True)),
        ("#### 18, not 19", "#### 18", (True, False)),
        ("#### 1450000", "#### 1,450,000", (True, True)),
        ("#### 0.30", "0.3", (True, True)),
        ("#### 19", "#### 18", (False, False)),
        ("none", "none", (False, False)),
        ("#### 7", "seven", (False, False)),
    ],
)
def test_numbers_are_compared_not_their_spelling(completion: str, reference: str, expected: tuple[bool, bool]) -> None:
    assert score(completion, reference) == expected


def test_reference_without_mark_is_its_last_number() -> None:
    assert reference_answer("3 + 4 = 7") == 7
    assert reference_answer("#### 5 of 7") == 5
    assert reference_answer("seven") is None


def test_commonest_answer_share_counts_numbers() -> None:
    assert commonest_answer_share(["#### 7", "#### 7.0", "#### 8", "#### 9"]) == 0.5
    assert commonest_answer_share([]) == 0.0


@pytest.mark.skipif(not GSM8K.is_dir(), reason="needs ../shared/data/gsm8k")
def test_every_gsm8k_answer_parses() -> None:
    answers = [
        json.loads(line)["answer"]
        for name in ("train", "test")
        for line in (GSM8K / f"{name}.jsonl").read_text().splitlines()
    ]
    values = [strict_answer(answer) for answer in answers]
    # The reference reading of GSM8K's own script: the text behind the mark, without commas.
    assert values == [int(answer.split("#### ")[1].replace(",", "")) for answer in answers]
    assert (len(values), sum(value < 0 for value in values if value is not None)) == (8792, 5)
