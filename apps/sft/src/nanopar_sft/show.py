r"""An example for human eyes: its tokens, and which of them are learned (the command ``data --show N``).

    <|user|> Mia| has| 3| cards|.| ... <|end|> <|assistant|> [[3| +| 4| =| 7|\n
    ####| 7|<|end|>]]

Tokens are separated by "|"; [[ and ]] enclose what is learned, so that the mask survives a pipe, where the colours (dim
for the prompt, bold green for what is learned) are lost.
"""

from collections.abc import Iterator

from rich.text import Text
from transformers import PreTrainedTokenizerFast

from nanopar_sft.chat import IGNORED, Example

PROMPT_STYLE, LEARNED_STYLE = "dim", "bold green"


def render(example: Example, tokenizer: PreTrainedTokenizerFast) -> Text:
    r"""One example as text for ``rich.print`` or a rich ``Console``; a line break in a token shows as \n and breaks."""
    text = Text()
    was_learned = False
    for number, (piece, label) in enumerate(zip(_pieces(example, tokenizer), example.labels, strict=True)):
        learned = bool(label != IGNORED)
        style = LEARNED_STYLE if learned else PROMPT_STYLE
        if was_learned and not learned:
            text.append("]]", LEARNED_STYLE)
        if number:
            text.append("|", PROMPT_STYLE)
        if learned and not was_learned:
            text.append("[[", LEARNED_STYLE)
        text.append(piece.replace("\n", "\\n\n"), style)
        was_learned = learned
    if was_learned:
        text.append("]]", LEARNED_STYLE)
    return text


def _pieces(example: Example, tokenizer: PreTrainedTokenizerFast) -> Iterator[str]:
    """The text that each token adds to what stands before it (a token by itself would lose its leading space)."""
    before = ""
    for end in range(1, len(example.input_ids) + 1):
        text = tokenizer.decode(example.input_ids[:end])
        yield text[len(before) :]
        before = text
