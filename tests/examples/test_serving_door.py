"""Process 0's door: who may come in, who comes again, and who has left."""

import contextlib
import socket

import pytest

pytest.importorskip("flax")
pytest.importorskip("orbax.checkpoint")

from moe_serve import door
from moe_serve.door import SECRET_BYTES, Door, knock
from moe_serve.frames import HEADER, Kind, LostProcessError


class Store(dict):
    """JAX's key-value store, of one process."""

    def key_value_set_bytes(self, key, value, allow_overwrite):
        assert allow_overwrite
        self[key] = value

    def blocking_key_value_get_bytes(self, key, milliseconds):
        assert milliseconds > 0
        return self[key]


@pytest.fixture
def opened(monkeypatch):
    store = Store()
    monkeypatch.setattr(door, "_store", lambda: store)
    monkeypatch.setattr(door.jax, "process_index", lambda: 3)
    opened = Door("127.0.0.1")
    yield opened
    opened.close()


def test_who_knows_the_secret_comes_in_and_talks(opened):
    with knock("127.0.0.1") as theirs:
        opened.wait_for([3])
        assert opened.waiting() == [3]
        with opened.take(3) as ours:
            ours.settimeout(5.0)
            theirs.sendall(b"hello")
            assert ours.recv(5) == b"hello"
    assert opened.waiting() == []


def test_of_two_lives_the_newest_waits_until_it_leaves(opened):
    with knock("127.0.0.1") as older:
        opened.wait_for([3])
        with knock("127.0.0.1"):
            assert older.recv(1) == b""  # sent away
            assert opened.waiting() == [3]
        assert opened.waiting() == []
    with pytest.raises(LostProcessError, match="process 3 is lost: it has left"):
        opened.take(3)


@pytest.mark.parametrize("word", ["no frame", "no secret", "another job"])
def test_strangers_are_sent_away(opened, monkeypatch, word):
    if word == "another job":
        monkeypatch.setenv("JAX_EP_JOB_SECRET", "11" * 32)
        stranger = knock("127.0.0.1")
    else:
        stranger = socket.create_connection(opened._server.getsockname())
        join = HEADER.pack(Kind.JOIN, SECRET_BYTES + 4) + bytes(SECRET_BYTES) + b"\3\0\0\0"
        stranger.sendall(join if word == "no secret" else b"GET / HTTP/1.0\r\n\r\n")
    stranger.settimeout(5.0)
    with stranger, contextlib.suppress(ConnectionResetError):  # there are bytes that nobody read
        assert stranger.recv(1) == b""
    assert opened.waiting() == []


def test_who_does_not_come_is_named(opened, monkeypatch):
    monkeypatch.setattr(door, "JOIN_LIMIT_S", 0.05)
    with pytest.raises(LostProcessError, match=r"processes \[1, 2\] have not joined"):
        opened.wait_for([1, 2])
