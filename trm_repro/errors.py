"""The two ways a command ends early: something the user can mend, and a run that must not go on."""


class InputError(ValueError):
    """Raised for what a user can mend; the command line prints it as one line and exits with code 2."""


class FaultError(RuntimeError):
    """Raised when going on would give wrong results, such as stale engine weights; exits with code 1."""
