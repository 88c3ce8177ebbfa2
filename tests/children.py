"""The environments of processes that tests start."""

import os


def plain() -> dict[str, str]:
    """This process's without XLA_FLAGS and NPROC, which conftest.py sets: a user's."""
    return {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "NPROC")}


def quick() -> dict[str, str]:
    """A user's, but XLA compiles as it does in this process: quickly."""
    return {name: value for name, value in os.environ.items() if name != "NPROC"}
