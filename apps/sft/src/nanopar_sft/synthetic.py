r"""Grade-school word problems made on the spot, in GSM8K's format: the app's default data, which needs no network.

A problem is a chain of one to three steps on one running number. An opening sentence gives the first number, every
step adds one sentence and one operation, and a question closes the text:

    opening   "Mia has 3 cards."             3
    step      "Tom gives Mia 4 cards."       3 + 4 = 7          how many steps, and how large the
    step      "Eva has 2 times as many."     7 * 2 = 14         numbers, is the ``Difficulty``
    question  "How many cards does Eva have?"

    answer    "3 + 4 = <<3+4=7>>7\n7 * 2 = <<7*2=14>>14\n#### 14"

Row i of a split is a pure function of (seed, split, i). The two splits cannot share a problem: a hash of the bare
arithmetic ("3+4*2", whatever the names and words around it) says to which split a problem belongs, and a drawn
problem of the other split is thrown away. The hash knows no seed, so this holds across seeds too.
"""

import hashlib
import random
import re
from dataclasses import dataclass

from nanopar_sft.errors import InputError

SPLITS = ("train", "test")

NAMES = ("Ann", "Ben", "Eva", "Leo", "Max", "Mia", "Sam", "Tom")
UNITS = ("apples", "books", "cards", "coins", "eggs", "pens")

# {a} holds the running number, {b} is somebody new, {u} the unit, {x} and {y} numbers.
START = ("{a} has {x} {u}.", "{a} finds {x} {u}.", "{a} buys {x} {u}.")
START_WITH_PRODUCT = ("{a} has {x} bags of {y} {u}.", "{a} buys {x} bags with {y} {u} each.")
SAME_HOLDER = {
    "+": ("{a} gets {y} more.", "{a} finds {y} more.", "{b} gives {a} {y} {u}."),
    "-": ("{a} loses {y}.", "{a} sells {y} {u}.", "{a} gives {b} {y}."),
}
NEXT_HOLDER = {  # from here on {b} holds the running number
    "+": ("{b} has {y} more than {a}.",),
    "-": ("{b} has {y} less than {a}.",),
    "*": ("{b} has {y} times as many as {a}.",),
}
QUESTION = ("How many {u} does {a} have?", "How many {u} does {a} have now?")

TEST_SHARE = 8  # one problem in 8 belongs to the test split


@dataclass(frozen=True)
class Difficulty:
    """How hard the problems are.

    Attributes:
        operands: smallest and largest number in a question. A step's result is at least 1, and at most twice the
            largest operand.
        step_shares: expected shares of problems with one, two and three steps.
    """

    operands: tuple[int, int] = (2, 20)
    step_shares: tuple[float, float, float] = (0.5, 0.4, 0.1)

    def __post_init__(self) -> None:
        low, high = self.operands
        if not 2 <= low <= high:
            raise InputError(f"operands {low} to {high}: the range must be ascending and start at 2 or more")
        if min(self.step_shares) < -1e-9 or abs(sum(self.step_shares) - 1) > 1e-9:
            raise InputError(f"step_shares {self.step_shares}: three shares of at least 0 must sum to 1")

    @property
    def largest_result(self) -> int:
        """The bound on every step's result."""
        return 2 * self.operands[1]


@dataclass(frozen=True)
class Problem:
    """One word problem: ``question`` and ``answer`` as in GSM8K, and the bare arithmetic, such as "3+4*2"."""

    question: str
    answer: str
    arithmetic: str


def make_problems(split: str, *, seed: int, count: int, difficulty: Difficulty | None = None) -> list[Problem]:
    """Rows 0 to ``count`` - 1 of a split."""
    return [make_problem(split, index, seed=seed, difficulty=difficulty) for index in range(count)]


def make_problem(split: str, index: int, *, seed: int, difficulty: Difficulty | None = None) -> Problem:
    """Row ``index`` of a split; depends on the arguments alone.

    Raises:
        InputError: the split is unknown, or the difficulty leaves it (almost) no problem to draw.
    """
    if split not in SPLITS:
        raise InputError(f"synthetic data has the splits train and test, not {split!r}")
    difficulty = difficulty or Difficulty()
    rng = random.Random(f"{seed}/{split}/{index}")
    # Drawn once, outside the loop: throwing problems away must not shift the shares.
    steps = _draw_steps(rng, difficulty)
    for _ in range(10_000):
        problem = _draw_problem(rng, steps, difficulty)
        if problem is not None and split_of(problem.arithmetic) == split:
            return problem
    raise InputError(f"{difficulty} leaves no {steps}-step problem for the {split} split: widen the operands")


def split_of(arithmetic: str) -> str:
    """The only split that may hold problems with this arithmetic; a + b counts as b + a, a * b as b * a."""
    first, operator, second, rest = re.fullmatch(r"(\d+)([-+*])(\d+)(.*)", arithmetic).groups()  # type: ignore[union-attr]
    if operator in "+*":
        first, second = sorted((first, second))
    digest = hashlib.blake2b(f"{first}{operator}{second}{rest}".encode(), digest_size=8).digest()
    return "test" if int.from_bytes(digest) % TEST_SHARE == 0 else "train"


def words() -> list[str]:
    """Every word that a problem can hold, sorted (the built-in tokenizer's vocabulary is made of it)."""
    sentences = [*START, *START_WITH_PRODUCT, *QUESTION]
    for phrases in (*SAME_HOLDER.values(), *NEXT_HOLDER.values()):
        sentences += phrases
    text = " ".join(re.sub(r"\{\w\}", " ", sentence) for sentence in sentences)
    return sorted({*re.findall(r"[A-Za-z]+", text), *NAMES, *UNITS})


def _draw_steps(rng: random.Random, difficulty: Difficulty) -> int:
    """One, two or three, with the chances of ``step_shares``."""
    one, two, _ = difficulty.step_shares
    point = rng.random()
    return 1 if point < one else 2 if point < one + two else 3


def _draw_problem(rng: random.Random, steps: int, difficulty: Difficulty) -> Problem | None:
    """A problem of either split, or None where a result came out below 1 or too large."""
    holder, *others = rng.sample(NAMES, steps + 1)
    unit = rng.choice(UNITS)
    total = rng.randint(*difficulty.operands)
    arithmetic = str(total)
    sentences: list[str] = []
    answer: list[str] = []
    for step, other in enumerate(others):
        operator = rng.choice("+-*")
        operand = rng.randint(*difficulty.operands)
        values = {"a": holder, "b": other, "u": unit, "x": total, "y": operand}
        if step == 0 and operator == "*" and rng.random() < 0.5:
            sentences.append(rng.choice(START_WITH_PRODUCT).format(**values))
        else:
            if step == 0:
                sentences.append(rng.choice(START).format(**values))
            same = SAME_HOLDER.get(operator, ())
            sentence = rng.choice(same + NEXT_HOLDER[operator])
            sentences.append(sentence.format(**values))
            holder = holder if sentence in same else other
        result = {"+": total + operand, "-": total - operand, "*": total * operand}[operator]
        if not 1 <= result <= difficulty.largest_result:
            return None
        answer.append(f"{total} {operator} {operand} = <<{total}{operator}{operand}={result}>>{result}")
        arithmetic += f"{operator}{operand}"
        total = result
    sentences.append(rng.choice(QUESTION).format(a=holder, u=unit))
    return Problem(" ".join(sentences), "\n".join([*answer, f"#### {total}"]), arithmetic)
