"""Define the error that prevents a command from starting."""


class StartupError(Exception):
    """One sentence that names the fault and the remedy.

    The command prints it and exits with status 2.
    """
