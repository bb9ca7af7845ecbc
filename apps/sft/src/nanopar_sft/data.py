"""The command ``data``: some rows as tokens with their loss mask, and what a training run would read."""

from rich.console import Console
from rich.table import Table

from nanopar_sft import answers, assemble
from nanopar_sft.config import Config
from nanopar_sft.show import render


def run(config: Config) -> None:
    """Print ``config.show`` rows, then counts."""
    console = Console(soft_wrap=True)
    chat = assemble.load_chat(config)
    encoded, batches = assemble.training_batches(config, chat)
    for number, example in enumerate(encoded.examples[: config.show], start=1):
        console.print(f"row {number}: {len(example.input_ids)} tokens, {example.label_count} learned")
        console.print(render(example, chat.tokenizer))
        console.print()
    lengths = [len(example.input_ids) for example in encoded.examples]
    learned = sum(example.label_count for example in encoded.examples)
    table = Table(show_header=False, box=None)
    table.add_row("training rows", f"{len(lengths):,}")
    table.add_row("left out, longer than seq_len", f"{encoded.too_long:,} (longest: {encoded.longest} tokens)")
    table.add_row("tokens", f"{sum(lengths):,}, of which learned {learned:,}")
    table.add_row("unknown to the tokenizer", f"{chat.unknown_share(encoded.examples):.1%} of the tokens")
    table.add_row("tokens per row", f"mean {sum(lengths) / len(lengths):.1f}, most {max(lengths)}")
    table.add_row("steps per epoch", f"{batches.steps_in(1):,} of {config.batch_size} rows")
    if held_back := assemble.held_back_rows(config):
        share = answers.commonest_answer_share([row.answer for row in held_back])
        table.add_row("held-back rows", f"{len(held_back):,}; the commonest answer is right on {share:.1%}")
    console.print(table)
