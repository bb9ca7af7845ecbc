"""The one exception that means "the user's input is wrong" rather than "the program failed"."""


class InputError(Exception):
    """Bad input: a key, a file or a row that cannot be used.

    The message is one sentence that names the value and the remedy. The command line prints it as the single line
    `nanopar-sft: error: ...` and exits with status 2, before any process is started or any file is written.
    """
