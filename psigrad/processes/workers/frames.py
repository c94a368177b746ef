"""Messages on a worker's pipes: a mark, a number, a length, and the content.

Requests are pickles, made by the trainer alone. Answers are JSON: nothing that comes out of a worker is unpickled. An answer has
the number of its request; with the mark, a stray or misplaced one is noticed.
"""

from __future__ import annotations

import json
import pickle
import struct
from typing import Any, BinaryIO

HEADER = struct.Struct("<8sQQ")
MARK = b"psigrad\x01"
# Bytes of one answer, beyond which a worker is taken to have gone wrong.
MOST = 64 << 20


def request(number: int, message: Any) -> bytes:
    """A request as it goes through a pipe."""
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return HEADER.pack(MARK, number, len(data)) + data


def response(number: int, message: Any) -> bytes:
    """An answer as it goes through a pipe. Raises `TypeError` or `ValueError` for what JSON can't hold."""
    data = json.dumps(message, allow_nan=False).encode()
    return HEADER.pack(MARK, number, len(data)) + data


def read_request(stream: BinaryIO) -> tuple[int, Any]:
    """The next request and its number. Raises `EOFError` if the other side is gone."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        raise EOFError
    _, number, length = HEADER.unpack(header)
    data = stream.read(length)
    if len(data) < length:
        raise EOFError
    return number, pickle.loads(data)
