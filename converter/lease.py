"""A lease: one converter at a time writes below a path of a bucket.

An object that is made only where there is none (`ifGenerationMatch=0`, which the service decides atomically) and
rewritten every `RENEW_SECONDS`. One that was not rewritten for `EXPIRE_SECONDS` belongs to a process that has died,
and whoever replaces exactly that generation has the lease. All times are the service's own: when the object was
written, and the `Date` of its answers. A note in it tells the next holder where the last one was writing.
"""

from __future__ import annotations

import datetime
import email.utils
import json
import logging
import os
import socket
import threading
import time
import uuid
from typing import Any

from converter import buckets
from converter.errors import WorldError

log = logging.getLogger("converter")

RENEW_SECONDS = 20.0

EXPIRE_SECONDS = 100.0
"""With the time until the next try, less than the two minutes that a killed run may block its successor for."""

_TRIES = 10
"""At taking a lease that changes meanwhile."""


class Lease:
    """A lease that this process holds.

    Attributes:
      path: of the object.
      note: what its holder, or the dead one it was taken over from, has written into it; empty for nothing.
    """

    def __init__(self, path: object) -> None:
        self.path = path
        self.note = ""
        self._owner = uuid.uuid4().hex
        self._bucket, self._name = buckets.split(path)
        self._generation = 0
        self._unknown = False
        self._renewed = 0.0
        self._taken = False
        self._keep = False
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)

    def acquire(self) -> None:
        """Take it.

        Raises:
          WorldError: another one has it, or the bucket does not answer.
          RequestError: no such bucket, or no permission.
        """
        from google.api_core.exceptions import PreconditionFailed

        generation = 0
        for _ in range(_TRIES):
            try:
                self._put(generation)
            except PreconditionFailed as error:
                # Another one was faster, or what a dead one had under way has arrived: what is there now decides.
                generation = self._replaceable(error)
            else:
                if generation:
                    log.info("the lease %s was a dead converter's: taken over", self.path)
                self._thread.start()
                return
        raise self._held("its lease changes again and again")

    def _replaceable(self, refusal: Any) -> int:
        """The generation of the lease that may be written over: none's, this process's or a dead one's, with its note.

        Raises:
          WorldError: it is a living one's.
        """
        found = buckets.get(self.path)
        self.note = (found.metadata or {}).get("note", "") if found is not None else ""
        if found is None or self._is_own(found):
            return int(found.generation) if found is not None else 0
        date = email.utils.parsedate_to_datetime(refusal.response.headers["Date"])
        age = (date - found.updated).total_seconds()
        left = EXPIRE_SECONDS - age
        if left > 0:
            who = (found.metadata or {}).get("who", "unknown")
            raise self._held(f"{who} renewed its lease {max(0.0, age):.0f} s ago; a dead one's ends in {left:.0f} s")
        return int(found.generation)

    def _held(self, why: str) -> WorldError:
        return WorldError(f"another converter is writing to {str(self.path).rpartition('/')[0]}: {why}")

    def _put(self, generation: int, *, seconds: float | None = None) -> None:
        """Write the object over a generation; where an answer got lost, what is there may be our own."""
        from google.api_core.exceptions import PreconditionFailed

        blob = buckets._bucket(self._bucket).blob(self._name)
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        who = f"{socket.gethostname()} (process {os.getpid()})"
        blob.metadata = {"owner": self._owner, "who": who, "note": self.note}
        content = json.dumps({"who": who, "renewed": now}).encode()
        began = time.monotonic()
        self._unknown = True
        try:
            buckets.call(
                self._bucket, lambda: buckets.upload(blob, content, generation=generation), seconds=seconds, of="bucket"
            )
        except PreconditionFailed:
            found = buckets.get(self.path)
            if not self._is_own(found):
                self._unknown = False
                raise
            blob = found
        self._generation, self._unknown = int(blob.generation), False
        self._renewed = began

    def _is_own(self, blob: Any) -> bool:
        return blob is not None and (blob.metadata or {}).get("owner") == self._owner

    def _run(self) -> None:
        while not self._stop.wait(RENEW_SECONDS):
            try:
                self._renew(RENEW_SECONDS)
            except WorldError as error:
                # Perhaps it works next time; whether too much time has passed is seen in `check` and `confirm`.
                log.debug("%s", error)
            except Exception as error:
                log.warning("the lease %s cannot be renewed: %s", self.path, error)

    def _renew(self, seconds: float | None) -> None:
        from google.api_core.exceptions import PreconditionFailed

        with self._lock:
            if self._taken or self._stop.is_set():
                return
            try:
                self._put(self._generation, seconds=seconds)
            except PreconditionFailed:
                self._taken = True

    def check(self) -> None:
        """Raise WorldError where another one has it by now; asks nobody."""
        if self._taken:
            raise WorldError(
                f"another converter has taken over {self.path}, which could not be renewed for {EXPIRE_SECONDS:.0f} s"
            )

    def confirm(self) -> None:
        """Raise WorldError where another one may have it by now; asks, unless it was renewed recently."""
        if time.monotonic() - self._renewed > EXPIRE_SECONDS * 0.8:
            self._renew(None)
        self.check()

    def write_note(self, note: str) -> None:
        """Note something for whoever may inherit the lease."""
        self.note = note
        self._renew(None)
        self.check()

    def keep(self) -> None:
        """Leave it behind, as a dead process does: something unfinished lies there."""
        self._keep = True

    @property
    def held(self) -> bool:
        """Whether it was ever taken."""
        return bool(self._generation)

    @property
    def kept(self) -> bool:
        """Whether what lies there is no longer this process's to touch."""
        return self._keep or self._taken

    def release(self) -> None:
        """Give it back if it was taken, or leave it to expire."""
        from google.api_core.exceptions import PreconditionFailed

        self._stop.set()
        if self.kept:
            return
        blob = buckets._bucket(self._bucket).blob(self._name)

        def delete() -> None:
            if self._unknown:
                # A write that nobody has answered may have been done all the same.
                found = blob.bucket.get_blob(self._name, timeout=10, retry=None)
                self._generation = int(found.generation) if self._is_own(found) else 0
            if self._generation:
                blob.delete(if_generation_match=self._generation, timeout=10, retry=None)

        with self._lock:
            if self.kept or not (self._generation or self._unknown):
                return
            try:
                buckets.call(self._bucket, delete, seconds=buckets.CLEANING_SECONDS)
            except (OSError, PreconditionFailed) as error:
                log.warning("the lease %s was left behind: %s", self.path, error)
