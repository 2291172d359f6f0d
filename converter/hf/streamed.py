"""Files of a remote repository, read by ranges as they are needed: nothing is kept but what will be read again."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from converter.errors import WorldError
from converter.hf.ahead import Ahead, Segment
from converter.hf.blocks import Blocks
from converter.hf.checksums import Pieces, combined, crc32c
from converter.hf.remote import Ranges, Server
from converter.hf.spool import Spool

log = logging.getLogger("converter")

_CHECKED_ANYWAY = 1 / 16
"""Of a file may be read only to have its checksum; where more is missing, only a part of it was converted."""

_WHOLE_TRIES = 3

_KEPT_BLOCKS = 64 << 20
"""Bytes of memory that are kept for what is read next."""

PART_BYTES = 8 << 20
"""Asked for in one request where no plan says otherwise."""


class StreamedFiles:
    """The weight files on a server.

    What was read of a file is remembered by its checksum: reading the same range again must give the same, and a file
    whose checksum is known must in the end have it.
    """

    def __init__(self, server: Server) -> None:
        self.server = server
        self.stop = threading.Event()
        self._ranges = Ranges(server)
        self._blocks = Blocks(_KEPT_BLOCKS)
        self._pieces = {name: Pieces(file.size) for name, file in server.files.items()}
        self._ahead: Ahead | None = None
        self._spool: Spool | None = None
        self._used: Mapping[int, Iterable[tuple[str, int, int]]] = {}
        self._group = -1

    def bytes_of(self, name: str, begin: int, end: int) -> memoryview:
        """Bytes `begin` to `end` of a file: read ahead, kept from an earlier time, or asked for now.

        Raises:
          RequestError: the server refuses, or the file has changed.
          WorldError: the server failed for too long, or sent damaged data.
        """
        if self._ahead is not None and (data := self._ahead.take(name, begin, end, self.stop)) is not None:
            return data
        if self._ahead is None and (kept := self._kept(name, begin, end)) is not None:
            return kept
        return self.fetch(name, begin, end)

    def fetch(self, name: str, begin: int, end: int) -> memoryview:
        """Bytes of a file, asked for now."""
        data = self._read(name, begin, end)
        if name in self._pieces and not self._pieces[name].add(begin, end, crc32c(data)):
            raise WorldError(
                f"{name} of {self.server.label}: bytes {begin} to {end} came differently when read again; one of the "
                "two was damaged on the way, or the file was replaced; try again"
            )
        return data

    def whole(self, name: str) -> bytes:
        """A small file, held against what its server knows it by; one that is damaged is asked for again.

        Raises:
          RequestError, WorldError: as `fetch` does.
        """
        file = self.server.files[name]
        for _ in range(_WHOLE_TRIES):
            data = bytes(self._read(name, 0, file.size))
            git = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
            if file.git_sha1 in (None, git) and file.crc32c in (None, crc32c(data)):
                return data
        raise WorldError(f"{name} of {self.server.label} comes damaged again and again; try again later")

    def read_ahead(
        self,
        segments: Iterator[Segment],
        *,
        limit: int,
        spool_limit: int,
        connections: int,
        spool: Path | None,
        used: Mapping[int, Iterable[tuple[str, int, int]]],
        stop: threading.Event,
    ) -> None:
        """Begin to fetch what will be needed.

        Args:
          segments: in the order they will be needed.
          limit: bytes held in memory.
          spool_limit: bytes in the spool that nobody has asked for yet.
          spool: folder for what is read again, None to fetch that again.
          used: group -> (file, begin, end) of what no later group reads.
          stop: set when nobody waits for data any more.
        """
        self.stop = stop
        self._spool = Spool(spool, (each for ranges in used.values() for each in ranges)) if spool is not None else None
        self._used = used
        self._group = -1
        self._blocks = Blocks(limit)
        self._ahead = Ahead(
            segments, self._fetch_segment, self._kept, limit=limit, disk_limit=spool_limit, connections=connections
        )

    def reached(self, group: int) -> None:
        """Begin with the reading for a group of chunks; that for all groups before is over."""
        if self._ahead is None:
            return
        self._ahead.reach(group)
        if self._spool is not None:
            for number in range(max(self._group, 0), group):
                for file, begin, end in self._used.get(number, ()):
                    self._spool.drop(file, begin, end)
        self._group = group

    def close(self) -> None:
        """Read ahead no more."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None
        if self._spool is not None:
            self._spool.close()
            self._spool = None

    @contextlib.contextmanager
    def held(self, ranges: Sequence[tuple[str, int, int]], spool: Path, connections: int) -> Iterator[None]:
        """Bring byte ranges here, kept on disk for as long as the block lasts.

        Raises:
          RequestError, WorldError: as `bytes_of` does.
        """
        parts = [
            (name, start, min(start + PART_BYTES, end))
            for name, begin, end in ranges
            for start in range(begin, end, PART_BYTES)
        ]
        kept = Spool(spool, ranges)

        def bring(part: tuple[str, int, int]) -> None:
            name, begin, end = part
            kept.put(name, begin, self.fetch(name, begin, end))

        try:
            with ThreadPoolExecutor(connections, thread_name_prefix="ahead") as pool:
                for _ in pool.map(bring, parts):
                    pass
            self._spool = kept
            yield
        finally:
            self._spool = None
            kept.close()

    def check(self) -> None:
        """Hold what was read against the checksums of the files, as far as they are known.

        Raises:
          WorldError: a file differs: it was damaged on the way.
        """
        for name, pieces in self._pieces.items():
            expected = self.server.files[name].crc32c
            if expected is None or not name.endswith(".safetensors"):
                continue
            missing = sum(end - begin for begin, end in pieces.gaps())
            if missing == pieces.size:
                continue
            if missing > max(PART_BYTES, pieces.size * _CHECKED_ANYWAY):
                log.info(
                    "%s of %s was read in part only (%d of %d bytes): its checksum could not be compared",
                    *(name, self.server.label, pieces.size - missing, pieces.size),
                )
            elif pieces.whole(lambda begin, end, name=name: self._checksum(name, begin, end)) != expected:  # type: ignore[misc]
                raise WorldError(
                    f"{name} of {self.server.label} was damaged on the way: its CRC-32C is not the object's; try again"
                )

    def _checksum(self, name: str, begin: int, end: int) -> int:
        total = 0
        for start in range(begin, end, PART_BYTES):
            part = self._read(name, start, min(start + PART_BYTES, end))
            total = combined(total, crc32c(part), len(part))
        return total

    def _read(self, name: str, begin: int, end: int) -> memoryview:
        data = self._blocks.take(max(0, end - begin))
        self._ranges.read(name, begin, data)
        return data

    def _fetch_segment(self, segment: Segment) -> memoryview:
        data = self.fetch(segment.file, segment.begin, segment.end)
        if not segment.keep:
            return data
        assert self._spool is not None, "what is kept has a place"
        self._spool.put(segment.file, segment.begin, data)
        kept = self._spool.view(segment.file, segment.begin, segment.end)
        assert kept is not None, "it has been put there"
        return kept

    def _kept(self, name: str, begin: int, end: int) -> memoryview | None:
        return self._spool.view(name, begin, end) if self._spool is not None else None
