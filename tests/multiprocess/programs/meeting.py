"""Where the processes of a program wait for each other, whatever becomes of their ranks."""

from jax_ep import _jax_compat

LIMIT_MS = 120_000


def meet(name, processes=None):
    """Returns when all processes, or those given, are here; each name once.

    By JAX's coordination service: a rank's last messages, its proxy and its death play no part.
    """
    _jax_compat.distributed_client().wait_at_barrier(name, LIMIT_MS, processes)
