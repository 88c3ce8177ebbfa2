"""Records under a job's secret: nobody without it reads, makes, changes or moves one."""

from __future__ import annotations

import pytest

from jax_ep import _env
from jax_ep._runtime import seal

SECRET = b"0123456789abcdef"
PLACE = "jax_ep/group.0/0/1"


@pytest.mark.parametrize("message", [b"", b"x", b'{"record": 1}', bytes(range(256)) * 50])
def test_a_sealed_record_comes_back(message: bytes) -> None:
    stored = seal.seal(SECRET, PLACE, message)
    assert seal.unseal(SECRET, PLACE, stored) == message
    assert len(message) < 8 or message[:8] not in stored
    assert seal.seal(SECRET, PLACE, message) != stored  # a nonce of its own
    assert seal.unseal(b"", PLACE, seal.seal(b"", PLACE, message)) == message


def test_what_others_made_is_refused() -> None:
    stored = seal.seal(SECRET, PLACE, b"a token")
    for position in range(len(stored)):
        changed = bytearray(stored)
        changed[position] ^= 1
        with pytest.raises(seal.SealError):
            seal.unseal(SECRET, PLACE, bytes(changed))
    for length in range(len(stored)):
        with pytest.raises(seal.SealError):
            seal.unseal(SECRET, PLACE, stored[:length])
    with pytest.raises(seal.SealError, match="differs"):
        seal.unseal(SECRET, "jax_ep/group.1/0/1", stored)
    with pytest.raises(seal.SealError, match="differs"):
        seal.unseal(SECRET[::-1], PLACE, stored)
    with pytest.raises(seal.SealError, match="this process has none"):
        seal.unseal(b"", PLACE, stored)
    with pytest.raises(seal.SealError, match="this process has one"):
        seal.unseal(SECRET, PLACE, b"{}")


def test_a_short_secret_is_refused_without_being_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(_env.SECRET_ENV, "hunter2")
    with pytest.raises(ValueError, match="got 7 bytes, expected at least 16") as info:
        _env.job_secret()
    assert "hunter2" not in str(info.value)
