"""Records of the bootstrap under a job's secret: JAX_EP_JOB_SECRET, the same in every process.

Encrypt-then-MAC from HMAC-SHA256 alone, with two keys derived from the secret. Whoever reads or
writes the store without knowing the secret learns no address, key or token of a record, and cannot
make, change or move one to another place. What it does not do: hide that records exist and how long
they are, keep anyone from deleting them, or tell one job from another of the same secret (a fresh
secret per job does).
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

from jax_ep._env import SECRET_ENV

_MAGIC = b"sealed1:"
_NONCE_BYTES = 16
_MAC_BYTES = hashlib.sha256().digest_size


class SealError(ValueError):
    """A record that was not made under this process's secret."""


def seal(secret: bytes, place: str, message: bytes) -> bytes:
    """`message` as it is stored at `place`; without a secret, as it is."""
    if not secret:
        return message
    nonce = secrets.token_bytes(_NONCE_BYTES)
    body = nonce + _masked(secret, nonce, message)
    return _MAGIC + body + _mac(secret, place, body)


def unseal(secret: bytes, place: str, stored: bytes) -> bytes:
    """The message that was sealed for `place`.

    Raises:
        SealError: it was sealed with another secret or for another place, or changed, or only one
            of the two sides has a secret.
    """
    is_sealed = stored.startswith(_MAGIC)
    if not secret:
        if is_sealed:
            raise SealError(f"it has a {SECRET_ENV} and this process has none")
        return stored
    if not is_sealed:
        raise SealError(f"it has no {SECRET_ENV} and this process has one")
    body, mac = stored[len(_MAGIC) : -_MAC_BYTES], stored[-_MAC_BYTES:]
    if not hmac.compare_digest(mac, _mac(secret, place, body)):
        raise SealError(f"its {SECRET_ENV} differs, or somebody else wrote its record")
    return _masked(secret, body[:_NONCE_BYTES], body[_NONCE_BYTES:])


def _key(secret: bytes, use: str) -> bytes:
    return hmac.digest(secret, f"jax_ep bootstrap {use}".encode(), "sha256")


def _mac(secret: bytes, place: str, body: bytes) -> bytes:
    name = place.encode()
    length = len(name).to_bytes(8, "little")
    return hmac.digest(_key(secret, "mac"), length + name + body, "sha256")


def _masked(secret: bytes, nonce: bytes, message: bytes) -> bytes:
    """`message` XOR a keystream; its own inverse."""
    key = _key(secret, "stream")
    blocks = range(-(-len(message) // _MAC_BYTES))
    stream = b"".join(hmac.digest(key, nonce + i.to_bytes(8, "little"), "sha256") for i in blocks)
    mask = int.from_bytes(stream[: len(message)], "little")
    return (int.from_bytes(message, "little") ^ mask).to_bytes(len(message), "little")
