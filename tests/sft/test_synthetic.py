import re
from collections import Counter
from itertools import product

import pytest

from nanopar_sft.answers import commonest_answer_share, strict_answer
from nanopar_sft.errors import InputError
from nanopar_sft.synthetic import Difficulty, Problem, make_problem, make_problems, split_of, words

ROWS = 3000
MARK = re.compile(r"(\d+) ([-+*]) (\d+) = <<(\d+)([-+*])(\d+)=(\d+)>>(\d+)")


def chain(answer: str) -> str:
    """The bare arithmetic of an answer, read from its lines: "3+4*2"."""
    *lines, last = answer.split("\n")
    parts: list[str] = []
    running = None
    for line in lines:
        match = MARK.fullmatch(line)
        assert match, line
        left, operator, right, *marked, result = match.groups()
        assert marked == [left, operator, right, result]
        assert running in (None, left)
        parts += [operator, right] if parts else [left, operator, right]
        running = result
    assert last == f"#### {running}"
    return "".join(parts)


@pytest.fixture(scope="module")
def train() -> list[Problem]:
    return make_problems("train", seed=0, count=ROWS)


@pytest.fixture(scope="module")
def test() -> list[Problem]:
    return make_problems("test", seed=0, count=ROWS)


def test_answers_are_right_positive_and_in_range(train: list[Problem], test: list[Problem]) -> None:
    for problem in train + test:
        assert chain(problem.answer) == problem.arithmetic
        running = None
        for left, operator, right, result in re.findall(r"(\d+) ([-+*]) (\d+) = <<.*?>>(\d+)", problem.answer):
            value = eval(f"{left}{operator}{right}")
            assert str(value) == result
            assert 1 <= value <= 40
            assert 2 <= int(right) <= 20
            running = value
        assert strict_answer(problem.answer) == running


def test_question_tells_the_numbers_in_order(train: list[Problem]) -> None:
    for problem in train:
        assert re.findall(r"\d+", problem.question) == re.findall(r"\d+", problem.arithmetic)


def test_question_asks_for_whoever_holds_the_result() -> None:
    """Play a question by hand: hold a tally for everybody who is named, and answer it."""
    for problem in make_problems("train", seed=3, count=500):
        assert play(problem.question) == strict_answer(problem.answer), problem.question


def play(question: str) -> int:
    """A reader of the problems that knows the sentences' meaning but not how they were made."""
    tally: dict[str, int] = {}
    *sentences, asked = re.split(r"(?<=[.?]) ", question)
    for sentence in sentences:
        name, verb, *_ = sentence.split()
        numbers = [int(number) for number in re.findall(r"\d+", sentence)]
        other = re.search(r" (?:than|as) ([A-Z]\w+)\.", sentence)
        if "bags" in sentence:
            tally[name] = numbers[0] * numbers[1]
        elif other and "times" in sentence:
            tally[name] = numbers[0] * tally[other[1]]
        elif other:
            tally[name] = tally[other[1]] + (numbers[0] if "more" in sentence else -numbers[0])
        elif verb in ("loses", "sells") or (verb == "gives" and name in tally):
            tally[name] -= numbers[0]
        elif verb == "gives":
            tally[sentence.split()[2]] += numbers[0]
        elif "more" in sentence:
            tally[name] += numbers[0]
        else:
            tally[name] = numbers[0]
    return tally[re.search(r"does (\w+) have", asked)[1]]


def test_rows_depend_on_seed_split_and_index_alone(train: list[Problem]) -> None:
    assert [make_problem("train", i, seed=0) for i in (2999, 7, 0)] == [train[2999], train[7], train[0]]
    assert make_problem("train", 0, seed=1) != train[0]
    # The very text, so that a change of Python or of the generator cannot pass unseen.
    assert make_problem("test", 0, seed=0) == Problem(
        "Leo finds 7 coins. Eva has 3 less than Leo. Eva finds 12 more. How many coins does Eva have?",
        "7 - 3 = <<7-3=4>>4\n4 + 12 = <<4+12=16>>16\n#### 16",
        "7-3+12",
    )


def test_every_problem_of_a_small_world_is_in_one_split_only() -> None:
    world = Difficulty(operands=(2, 9), step_shares=(0.5, 0.5, 0.0))
    seen = {}
    for split in ("train", "test"):
        for seed in (0, 1):
            rows = make_problems(split, seed=seed, count=6000, difficulty=world)
            for arithmetic in {chain(row.answer) for row in rows}:
                assert seen.setdefault(arithmetic, split) == split
    # Every one-step problem of that world, enumerated, was drawn.
    numbers = range(2, 10)
    possible = {
        f"{a}{operator}{b}"
        for a, operator, b in product(numbers, "+-*", numbers)
        if 1 <= eval(f"{a}{operator}{b}") <= 18
    }
    assert {arithmetic for arithmetic in seen if len(arithmetic) == 3} == possible
    for arithmetic in possible:
        mirrored = arithmetic[::-1]
        if arithmetic[1] != "-":
            assert seen[arithmetic] == seen[mirrored]
    assert 0.05 < Counter(seen.values())["test"] / len(seen) < 0.25


def test_splits_are_told_apart_by_arithmetic_alone() -> None:
    assert split_of("13+4*2") == split_of("4+13*2")
    assert {split_of(f"{a}-{b}") for a in range(3, 9) for b in range(2, a)} == {"train", "test"}


def test_shares_of_steps_are_those_asked_for(train: list[Problem], test: list[Problem]) -> None:
    for rows in (train, test):
        counts = Counter(problem.answer.count("<<") for problem in rows)
        for steps, share in zip((1, 2, 3), (0.5, 0.4, 0.1), strict=True):
            assert counts[steps] / ROWS == pytest.approx(share, abs=0.03)


def test_no_answer_is_common(train: list[Problem], test: list[Problem]) -> None:
    for rows in (train, test):
        assert commonest_answer_share([problem.answer for problem in rows]) < 0.1


def test_problems_use_the_declared_words_only(train: list[Problem]) -> None:
    used = {word for problem in train for word in re.findall(r"[A-Za-z]+", problem.question + problem.answer)}
    assert used == set(words())


@pytest.mark.parametrize(
    "bad", [{"operands": (9, 2)}, {"operands": (0, 5)}, {"step_shares": (0.5, 0.1, 0.1)}, {"step_shares": (2, -1, 0)}]
)
def test_impossible_difficulty(bad: dict[str, tuple[float, ...]]) -> None:
    with pytest.raises(InputError, match=str(next(iter(bad)))):
        Difficulty(**bad)  # type: ignore[arg-type]


def test_difficulty_without_problems() -> None:
    only_problem = Difficulty((20, 20), (1, 0, 0))  # 20 + 20: 20 - 20 and 20 * 20 are out of range
    here, elsewhere = ("train", "test") if split_of("20+20") == "train" else ("test", "train")
    assert make_problem(here, 0, seed=0, difficulty=only_problem).arithmetic == "20+20"
    with pytest.raises(InputError, match=f"leaves no 1-step problem for the {elsewhere} split"):
        make_problem(elsewhere, 0, seed=0, difficulty=only_problem)


def test_unknown_split() -> None:
    with pytest.raises(InputError, match="'dev'"):
        make_problems("dev", seed=0, count=1)  # type: ignore[arg-type]
