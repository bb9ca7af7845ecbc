"""Checks that need more than the configuration: files, presets, data. They run before any rank is started."""

from nanopar_sft.config import Config


def check(command: str, config: Config) -> None:
    """Raise InputError if `command` cannot run with `config`; reads, never writes."""
