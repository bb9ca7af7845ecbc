r"""Conversations as token ids and labels.

    <|user|>  How  many  ?  <|end|>  <|assistant|>   3  +  4  =  7  \n  ####  7  <|end|>     input_ids
      -100   -100  -100 ...  -100        -100        3  +  4  =  7  \n  ####  7  <|end|>     labels

The tokenizer's own chat template writes the conversation. It is tokenised in one piece, as the model will see it, and
labels are laid by character positions: an assistant's turn counts from where the template's generation prompt ends
(there a model starts to write) through the first stop token behind its content. Whatever a template writes elsewhere (a
default system turn, line breaks, an end-of-text token) is read but not learned, and what stands behind the last label
is left off.

A row longer than ``seq_len`` is left out as a whole and counted: cut rows would teach answers without an end.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from os.path import commonprefix
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerFast

from nanopar_sft.errors import InputError
from nanopar_sft.rows import Message, Row

IGNORED = -100  # the label of tokens that the loss leaves out

Ids = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Example:
    """One row as the model reads it.

    Attributes:
        input_ids: [T].
        labels: [T]; the token itself where it is to be learned, else -100. Not shifted: the model (or the loss)
            compares position t's logits with labels[t + 1]. labels[0] is always -100.
    """

    input_ids: Ids
    labels: Ids

    @property
    def label_count(self) -> int:
        """Tokens that the loss counts."""
        return int((self.labels[1:] != IGNORED).sum())


@dataclass(frozen=True)
class Encoded:
    """What became of some rows: the examples that fit, in order, and how many did not (``too_long``)."""

    examples: list[Example]
    too_long: int
    longest: int  # tokens of the longest row, left out or not


class Chat:
    """A tokenizer's way to write conversations.

    Attributes:
        tokenizer: the tokenizer, with a chat template.
        end_of_turn: the token that ends an assistant's turn. Where the template writes none, the tokenizer's
            end-of-text token is put behind every conversation.
        stop_ids: tokens that end an answer when generating: ``end_of_turn`` and the tokenizer's end of text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        self._ending = ""
        written = self._written_behind_a_turn()
        if written is None:
            if tokenizer.eos_token_id is None:
                raise InputError(
                    "the tokenizer has neither an end-of-turn nor an end-of-text token: answers need an end"
                )
            self._ending = tokenizer.eos_token
        self.end_of_turn: int = tokenizer.eos_token_id if written is None else written
        eos = tokenizer.eos_token_id
        self.stop_ids = frozenset([self.end_of_turn] if eos is None else [self.end_of_turn, eos])

    def encode(self, rows: Sequence[Row], seq_len: int) -> Encoded:
        """Encode rows for training.

        Raises:
            InputError: no row fits into ``seq_len``, or the template leaves an answer's text out.
        """
        examples: list[Example] = []
        longest = shortest = 0
        for first in range(0, len(rows), 1024):
            for example in self._encode(rows[first : first + 1024]):
                length = len(example.input_ids)
                longest = max(longest, length)
                shortest = min(shortest or length, length)
                if length <= seq_len:
                    examples.append(example)
        if rows and not examples:
            raise InputError(f"seq_len {seq_len}: none of {len(rows)} rows fits, the shortest has {shortest} tokens")
        return Encoded(examples, len(rows) - len(examples), longest)

    def unknown_share(self, examples: Sequence[Example]) -> float:
        """The share of tokens that the tokenizer has no word for."""
        unknown = self.tokenizer.unk_token_id
        total = sum(len(example.input_ids) for example in examples)
        if unknown is None or total == 0:
            return 0.0
        return sum(int((example.input_ids == unknown).sum()) for example in examples) / total

    def encode_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation up to where the assistant's next turn begins."""
        [ids] = self._tokenize([self._prompt_text(messages)])["input_ids"]
        return list(ids)

    def decode(self, generated: Iterable[int]) -> str:
        """The text of generated ids up to the first stop token, without chat tokens."""
        ids = list(takewhile(lambda index: index not in self.stop_ids, generated))
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def _encode(self, rows: Sequence[Row]) -> list[Example]:
        """All of ``rows``, whatever their length (tokenised together: that is several times faster)."""
        texts = [self._text(row.messages) for row in rows]
        tokens = self._tokenize(texts)
        return [
            self._label(row, text, np.array(ids, np.int32), np.array([start for start, _ in offsets], np.int32))
            for row, text, ids, offsets in zip(rows, texts, tokens["input_ids"], tokens["offset_mapping"], strict=True)
        ]

    def _label(self, row: Row, text: str, ids: Ids, starts: Ids) -> Example:
        """Lay the labels over one tokenised conversation; token t begins at character ``starts[t]`` of ``text``."""
        learned = np.zeros(len(ids), np.bool_)
        end = 0
        for turn, message in enumerate(row.messages):
            if message.role != "assistant":
                continue
            # A template may write earlier turns otherwise once later ones follow, hence the common part.
            start = max(end, len(commonprefix([text, self._prompt_text(row.messages[:turn])])))
            content = message.content.strip()  # many templates strip it
            found = text.find(content, start)
            if found < 0:
                raise InputError(f"{row.where}: the chat template does not write this row's answer as it stands")
            end = found + len(content)
            stops = np.flatnonzero((starts >= end) & (ids == self.end_of_turn))
            if len(stops) and (not self._ending or turn == len(row.messages) - 1):
                end = int(starts[stops[0]]) + 1
            learned |= (starts >= start) & (starts < end)
        length = int(np.flatnonzero(learned)[-1]) + 1
        return Example(ids[:length], np.where(learned, ids, IGNORED)[:length].astype(np.int32))

    def _text(self, messages: Sequence[Message]) -> str:
        turns = [{"role": message.role, "content": message.content} for message in messages]
        return str(self.tokenizer.apply_chat_template(turns, tokenize=False)) + self._ending

    def _prompt_text(self, messages: Sequence[Message]) -> str:
        turns = [{"role": message.role, "content": message.content} for message in messages]
        return str(self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))

    def _tokenize(self, texts: list[str]) -> Any:
        """Ids and offsets; the template has written every chat token already, so none is added."""
        return self.tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True)

    def _written_behind_a_turn(self) -> int | None:
        """The first chat token that the template writes behind an assistant's content."""
        answer = "four"
        text = self._text([Message("user", "two"), Message("assistant", answer)])
        tokens = self._tokenize([text])
        special = {index for index, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        end = text.rindex(answer) + len(answer)
        for index, (start, _) in zip(tokens["input_ids"][0], tokens["offset_mapping"][0], strict=True):
            if start >= end and index in special:
                return int(index)
        return None
