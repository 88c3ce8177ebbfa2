"""The environment variables of jax_ep: their names, their values, and reading those of Python.

docs/tuning.md and docs/transports.md say what each is for; a test compares them with NAMES. What
C++ reads is checked by C++ (proxy/base/env.h).
"""

from __future__ import annotations

import contextlib
import difflib
import os
from collections.abc import Callable

from jax_ep import _extension, _warn

PREFIX = "JAX_EP_"
SECRET_ENV = "JAX_EP_JOB_SECRET"
MIN_SECRET_BYTES = 16
MOST_COUNT = 65536  # of threads or multiprocessors: more than there are
LOG_LEVELS = ("error", "warning", "info", "debug")
_INTERNAL = ("JAX_EP_LAUNCH", "JAX_EP_TEST_", "JAX_EP_PROXY_TEST_")  # prefixes
_OF_THE_BUILD = ("JAX_EP_GPU",)


def flag(name: str) -> bool | None:
    """A boolean: unset or empty (None), 0 or 1.

    Raises:
        ValueError: anything else.
    """
    text = os.environ.get(name, "")
    if text not in ("", "0", "1"):
        raise ValueError(f"{name}: got {text!r}, expected 0 or 1; unset it for the default")
    return None if text == "" else text == "1"


def positive_int(name: str) -> int | None:
    """A count: unset or empty (None), or 1 to MOST_COUNT.

    Raises:
        ValueError: anything else.
    """
    text = os.environ.get(name, "")
    if text == "":
        return None
    is_number = text.isascii() and text.isdecimal()
    digits = text.lstrip("0")
    if not is_number or not 0 < len(digits) <= len(str(MOST_COUNT)) or int(digits) > MOST_COUNT:
        raise ValueError(
            f"{name}: got {text!r}, expected an int from 1 to {MOST_COUNT}; unset it for the "
            "default"
        )
    return int(digits)


def log_level(name: str = "JAX_EP_LOG") -> str:
    """One of LOG_LEVELS.

    Raises:
        ValueError: anything else.
    """
    text = os.environ.get(name, "") or "warning"
    if text not in LOG_LEVELS:
        raise ValueError(
            f"{name}: got {text!r}, expected one of {', '.join(LOG_LEVELS)}; "
            "unset it for the default"
        )
    return text


def job_secret(name: str = SECRET_ENV) -> bytes:
    """The secret that seals the bootstrap's records, or b"" for none.

    Raises:
        ValueError: it is too short to be one.
    """
    secret = os.environb.get(name.encode(), b"")
    if secret and len(secret) < MIN_SECRET_BYTES:
        raise ValueError(
            f"{name}: got {len(secret)} bytes, expected at least {MIN_SECRET_BYTES}, random "
            "and the same in every process; make one per job with `openssl rand -hex 32`"
        )
    return secret


def _check_in_core(name: str) -> None:
    """Of those that C++ reads."""
    with contextlib.suppress(ImportError):  # then who would read them is not there
        _extension.load().check_environment(name)


NAMES: dict[str, Callable[[str], object]] = {
    "JAX_EP_LOG": log_level,
    "JAX_EP_DEBUG": flag,
    SECRET_ENV: job_secret,
    "JAX_EP_THREADS_PER_RANK": positive_int,
    "JAX_EP_HUGE_PAGES": flag,
    "JAX_EP_ZERO_COPY": flag,
    "JAX_EP_GPU_SMS": positive_int,
    "JAX_EP_GPU_TMA": flag,
    "JAX_EP_GPU_DIRECT": flag,
    **dict.fromkeys(
        (
            "JAX_EP_WINDOW_MESSAGES",
            "JAX_EP_WINDOW_BYTES",
            "JAX_EP_RING_SLOTS",
            "JAX_EP_PROXY_THREADS",
            "JAX_EP_INBOX_SLOTS",
            "JAX_EP_CALLER_PROGRESS",
            "JAX_EP_FAULTY",
            "JAX_EP_TRACE",
            "JAX_EP_SOCKET_IFNAME",
            "JAX_EP_OFI_PROVIDER",
            "JAX_EP_OFI_DOMAIN",
            "JAX_EP_VERBS_DEVICE",
            "JAX_EP_VERBS_GID_INDEX",
            "JAX_EP_VERBS_QPS",
            "JAX_EP_VERBS_TIMEOUT",
            "JAX_EP_VERBS_SL",
            "JAX_EP_VERBS_TC",
            "JAX_EP_VERBS_MTU",
        ),
        _check_in_core,
    ),
}


def check() -> None:
    """Looks at every variable of jax_ep that is set; warns of names that nothing reads.

    Raises:
        ValueError: a value is not allowed; says which are.
    """
    for name in sorted(name for name in os.environ if name.startswith(PREFIX)):
        if name in NAMES:
            NAMES[name](name)
        elif problem := unknown(name):
            _warn.warn(problem, RuntimeWarning)


def unknown(name: str) -> str:
    """What is wrong with the name, or ""."""
    if name in NAMES or name in _OF_THE_BUILD:
        return ""
    if not name.startswith(PREFIX) or name.startswith(_INTERNAL):
        return ""
    near = difflib.get_close_matches(name, NAMES, n=1)
    fix = f"did you mean {near[0]}?" if near else "unset it; docs/tuning.md lists all"
    return f"jax_ep: nothing reads the environment variable {name}; {fix}"
