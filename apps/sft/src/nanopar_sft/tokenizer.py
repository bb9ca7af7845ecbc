r"""Tokenizers: the built-in one for the synthetic data, and any Hugging Face one by directory or hub id.

The built-in vocabulary is the words of ``synthetic``, the numbers of one and two digits and a few signs:

    "Mia has 134 cards.\n#### 34"  ->  Mia  has  13  4  cards  .  \n  ####  34

Sums of whole numbers are learned in fewer steps than sums of single digits: there is no carry. Spaces cost no tokens.
They are put back by rule when decoding: one between two tokens, none between numbers, before ".", "?" and ",", or
beside a line break. Every synthetic problem comes back exactly; other text comes back up to its
spacing, with ``<unk>`` for unknown words. It is an ordinary ``tokenizer.json``, so that a saved model needs nothing
of nanopar to be used.
"""

from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from nanopar_sft import synthetic
from nanopar_sft.errors import InputError

BUILTIN = "builtin"
NUMBERS = (*map(str, range(100)), *(f"0{digit}" for digit in range(10)))
MARKS = (".", "?", ",", "+", "-", "*", "/", "=", "####", "\n")

# As Phi-3 and Phi-MoE write a conversation; a role token swallows the line break behind it.
PHI_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
PHI_TOKENS = ("<|end|>", "<|user|>", "<|assistant|>", "<|system|>")


def load_tokenizer(source: str) -> PreTrainedTokenizerFast:
    """The tokenizer of a directory or hub id, or the built-in one for "builtin"; it always has a chat template.

    A tokenizer that has Phi's chat tokens but no template of its own gets Phi's. No code of the source is run.

    Raises:
        InputError: nothing loadable at ``source``, no chat template, or no offsets (not a fast tokenizer).
    """
    if source == BUILTIN:
        return builtin_tokenizer()
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        kind = "directory" if Path(source).is_dir() else "directory or reachable hub id"
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(f"no tokenizer in {source!r} (not a {kind} with tokenizer.json): {reason}") from error
    if not tokenizer.is_fast:
        raise InputError(f"the tokenizer in {source!r} has no tokenizer.json: convert it with save_pretrained first")
    if tokenizer.chat_template is None:
        if not set(PHI_TOKENS) <= set(tokenizer.get_vocab()):
            raise InputError(f"the tokenizer in {source!r} has no chat template: use that of an instruct model")
        tokenizer.chat_template = PHI_TEMPLATE
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def builtin_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer of the synthetic problems; equal on every machine, since only ``synthetic`` shapes it."""
    special = ["<|endoftext|>", "<unk>", *PHI_TOKENS]
    vocabulary = [*special, *MARKS, *NUMBERS, *synthetic.words()]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocabulary)}, unk_token="<unk>"))
    # Each match is one token and spaces are dropped; a run of other characters is one unknown word.
    pieces = r"[0-9]{1,2}|[A-Za-z]+|####|\n|[^\sA-Za-z0-9]"
    tokenizer.normalizer = normalizers.Replace(Regex(r"[^\S\n]+"), " ")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(" ", behavior="removed"),
            pre_tokenizers.Split(Regex(pieces), behavior="isolated"),
        ]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.WordPiece(prefix="@@", cleanup=False),
            decoders.Fuse(),
            decoders.Replace(Regex(r"(?<=[0-9]) (?=[0-9])| (?=[.?,\n])|(?<=\n) | (?=<\|)|(?<=\|>) "), ""),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(t, special=True, rstrip=t in PHI_TOKENS) for t in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        chat_template=PHI_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )
