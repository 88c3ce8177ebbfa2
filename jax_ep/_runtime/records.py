"""How records of the bootstrap are written as bytes."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

_LENGTH = struct.Struct("<I")
_ENTRY = struct.Struct("<II")  # process, length


def encode(record: Mapping[str, Any], blob: bytes) -> bytes:
    """A record of JSON values, and bytes beside it."""
    text = json.dumps(record).encode()
    return _LENGTH.pack(len(text)) + text + blob


def decode(message: bytes) -> tuple[dict[str, Any], bytes]:
    """The inverse of `encode`.

    Raises:
        ValueError: it is not what `encode` makes.
    """
    if len(message) < _LENGTH.size:
        raise ValueError(f"got {len(message)} bytes, expected a record")
    (length,) = _LENGTH.unpack_from(message)
    end = _LENGTH.size + length
    record = json.loads(message[_LENGTH.size : end])
    if not isinstance(record, dict):
        raise ValueError(f"got a record of type {type(record).__name__}, expected an object")
    return record, message[end:]


def pack(stored: Mapping[int, bytes]) -> bytes:
    """The stored records of several processes in one value: {process: bytes}."""
    return b"".join(
        _ENTRY.pack(process, len(value)) + value for process, value in sorted(stored.items())
    )


def unpack(value: bytes) -> dict[int, bytes]:
    """The inverse of `pack`.

    Raises:
        ValueError: it is not what `pack` makes.
    """
    stored, position = {}, 0
    while position < len(value):
        if position + _ENTRY.size > len(value):
            raise ValueError(f"got {len(value)} bytes, expected records up to the last byte")
        process, length = _ENTRY.unpack_from(value, position)
        position += _ENTRY.size
        if process in stored or position + length > len(value):
            raise ValueError(f"got a record of process {process} that is there twice or cut short")
        stored[process] = value[position : position + length]
        position += length
    return stored
