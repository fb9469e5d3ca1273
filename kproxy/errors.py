"""What may go wrong while a command starts, said to the person who started it."""


class StartupError(Exception):
    """One sentence that names the thing and the way out; the command prints it and exits with status 2."""
