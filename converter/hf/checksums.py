"""CRC-32C of a file that is read in pieces, in any order: the pieces' checksums are put together.

The checksum of two pieces one after the other follows from those of the pieces and the length of the second: running
a CRC over zero bytes is linear over GF(2), so it is a 32 x 32 matrix of bits, and its powers of two are computed by
squaring. This is zlib's crc32_combine() with the polynomial of CRC-32C (RFC 3720, appendix B.4, reflected).
"""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable, Iterator
from functools import cache

import numpy as np

_POLYNOMIAL = 0x82F63B78

Matrix = tuple[int, ...]


def crc32c(data: memoryview | bytes) -> int:
    """Of one piece."""
    import google_crc32c

    # It takes no memoryview.
    return int(google_crc32c.value(np.frombuffer(data, np.uint8)))


def parse_crc32c(text: str) -> int:
    """As Google Cloud Storage writes it: base64 of four bytes, big-endian."""
    return int.from_bytes(base64.b64decode(text), "big")


def combined(first: int, second: int, second_length: int) -> int:
    """The CRC-32C of two pieces one after the other."""
    power = 0
    while second_length:
        if second_length & 1:
            first = _times(_zero_bytes(power), first)
        second_length >>= 1
        power += 1
    return first ^ second


@cache
def _zero_bytes(power: int) -> Matrix:
    """What 2**power zero bytes do to a CRC."""
    if power == 0:
        bit = (_POLYNOMIAL, *(1 << i for i in range(31)))
        matrix = bit
        for _ in range(3):
            matrix = _squared(matrix)
        return matrix
    return _squared(_zero_bytes(power - 1))


def _squared(matrix: Matrix) -> Matrix:
    return tuple(_times(matrix, column) for column in matrix)


def _times(matrix: Matrix, vector: int) -> int:
    result = 0
    for column in matrix:
        if not vector:
            break
        if vector & 1:
            result ^= column
        vector >>= 1
    return result


class Pieces:
    """The checksums of what was read of one file, from any thread."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._found: dict[tuple[int, int], int] = {}
        self._lock = threading.Lock()

    def add(self, begin: int, end: int, checksum: int) -> bool:
        """Note a piece; False where the same piece was another before."""
        with self._lock:
            return self._found.setdefault((begin, end), checksum) == checksum

    def gaps(self) -> list[tuple[int, int]]:
        """What must still be read until the pieces put together are the file."""
        return [(begin, end) for begin, end, found in self._walk() if found is None]

    def whole(self, read: Callable[[int, int], int]) -> int:
        """The checksum of the file.

        Args:
          read: gives the checksum of what no piece covers.
        """
        total = 0
        for begin, end, found in self._walk():
            total = combined(total, read(begin, end) if found is None else found, end - begin)
        return total

    def _walk(self) -> Iterator[tuple[int, int, int | None]]:
        """Pieces and gaps that tile the file."""
        with self._lock:
            pieces = sorted((begin, -end, checksum) for (begin, end), checksum in self._found.items() if end > begin)
        position = 0
        for begin, minus_end, checksum in pieces:
            if begin < position:
                continue
            if begin > position:
                yield position, begin, None
            yield begin, -minus_end, checksum
            position = -minus_end
        if position < self.size:
            yield position, self.size, None
