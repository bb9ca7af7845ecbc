r"""The number a text answers with, and whether it is the right one.

GSM8K ends an answer with a line "#### 72". Two readings are taken and reported apart:

    strict    the number right behind the first "####" that has one     "... so 72 in all.\n#### 72"
    flexible  the last number of the text, wherever it stands           "... the answer is $72."

Only the text that the model wrote is read, never the prompt (its numbers would be found by the flexible reading), and
only up to the first chat token. Numbers are compared as fractions: "18", "18.", "18.00" and "$18" are equal.
"""

import re
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

CHAT_TOKEN = re.compile(r"<\|[^|<>\s]+\|>|</?s>")

_MINUS = "-\u2212\u2010\u2011\u2013\ufe63\uff0d"  # hyphen-minus, the minus sign, and what is typed for it
_CURRENCY = "$\u20ac\u00a3\u00a5\u20b9"
_DENOMINATOR = r"(?:[ ]*/[ ]*(?P<denominator>[0-9]+))?"

# Behind "####" any comma groups digits, and a sign may stand apart from its number. Before the number may come, on the
# same line, markup (bold, code, LaTeX's "\$"), a colon, currency and plus signs.
_STRICT = re.compile(
    rf"####+(?:[ \t*_`\\:={_CURRENCY}+]|(?P<sign>[{_MINUS}]))*"
    rf"(?P<number>[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+){_DENOMINATOR}"
)
# In running text only groups of three count ("3,4" are two numbers), and a minus belongs to the number only if it
# touches it and there is nothing before it to subtract from.
_ANYWHERE = re.compile(
    rf"(?:(?<![\w).])(?P<sign>[{_MINUS}]))?[{_CURRENCY}]?(?:(?<=[{_CURRENCY}])(?P<late_sign>[{_MINUS}]))?"
    rf"(?P<number>(?:[0-9]{{1,3}}(?:,[0-9]{{3}})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+){_DENOMINATOR}"
)
_LONGEST = 300  # characters; a model caught in a loop can write thousands of digits, which int() refuses


class Score(NamedTuple):
    """Whether a completion's number equals the reference's, read either way."""

    strict: bool
    flexible: bool


def strict_answer(text: str) -> Fraction | None:
    """The number behind "####", or None; ``text`` is a completion without its prompt."""
    match = _STRICT.search(_until_chat_token(text))
    return None if match is None else _value(match)


def flexible_answer(text: str) -> Fraction | None:
    """The last number in the text, or None; ``text`` is a completion without its prompt."""
    matches = list(_ANYWHERE.finditer(_until_chat_token(text)))
    return _value(matches[-1]) if matches else None


def reference_answer(text: str) -> Fraction | None:
    """The number of a reference answer: behind "####" where there is one, else the last number, else None."""
    strict = strict_answer(text)
    return flexible_answer(text) if strict is None else strict


def score(completion: str, reference: str) -> Score:
    """Compare a completion with a reference answer; without a number on both sides nothing is equal."""
    wanted = reference_answer(reference)
    if wanted is None:
        return Score(False, False)
    return Score(strict_answer(completion) == wanted, flexible_answer(completion) == wanted)


def commonest_answer_share(references: Sequence[str]) -> float:
    """The accuracy of always giving the commonest answer: what a model that has learnt nothing can reach."""
    counts = Counter(reference_answer(reference) for reference in references)
    return max(counts.values()) / len(references) if references else 0.0


def _until_chat_token(text: str) -> str:
    return CHAT_TOKEN.split(text, maxsplit=1)[0]


def _value(match: re.Match[str]) -> Fraction | None:
    groups = match.groupdict()
    denominator = groups["denominator"] or "1"
    if len(match[0]) > _LONGEST or not denominator.strip("0"):
        return None
    number = Fraction(groups["number"].replace(",", "")) / int(denominator)
    return -number if groups["sign"] or groups.get("late_sign") else number
