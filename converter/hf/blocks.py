"""Blocks of memory that are used again when nobody looks at them any more: new memory costs a fault for every page."""

from __future__ import annotations

import threading
import weakref
from collections import deque

import numpy as np

_LEAST_BYTES = 1 << 20
"""Smaller ones are left to the allocator."""


class Blocks:
    """Gives memory, from any thread."""

    def __init__(self, limit: int) -> None:
        """Begin with none.

        Args:
          limit: bytes; blocks are dropped instead of kept where these and those in use would take more.
        """
        self._limit = limit
        self._lock = threading.Lock()
        self._free: deque[np.ndarray] = deque()
        self._bytes = 0
        # A block can come back in the middle of anything, so that no lock may be taken then.
        self._back: deque[np.ndarray] = deque()

    def take(self, size: int) -> memoryview:
        """Memory of `size` bytes, of any content; it is free again when the last view of it is gone."""
        if size < _LEAST_BYTES:
            return memoryview(bytearray(size))
        block = self._take(size)
        # An array of its own: as long as a memoryview of it lives, so does it.
        lent = block[:]
        weakref.finalize(lent, self._back.append, block).atexit = False
        return lent.data

    def _take(self, size: int) -> np.ndarray:
        with self._lock:
            while self._back:
                self._free.append(self._back.popleft())
            for number, block in enumerate(self._free):
                if block.nbytes == size:
                    del self._free[number]
                    return block
            while self._free and self._bytes + size > self._limit:
                self._bytes -= self._free.popleft().nbytes
            self._bytes += size
            return np.empty(size, np.uint8)
