"""What a run says on stderr: plain lines, or a JSON object a line for those who collect logs."""

from __future__ import annotations

import datetime
import itertools
import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from converter.memory import Monitor
    from converter.progress import Phases

log = logging.getLogger("converter")

HEARTBEAT_SECONDS = 50.0
"""A run that has said nothing for so long says that it is alive, so that a minute never passes in silence."""

_RETRIES_SECONDS = 60.0

_RETRIES_METRIC = "/tensorstore/kvstore/gcs/retries"


class Handler(logging.StreamHandler[Any]):
    """To stderr.

    Attributes:
      last: when it last said something, on the monotonic clock.
    """

    def __init__(self, *, as_json: bool) -> None:
        super().__init__(sys.stderr)
        self.last = time.monotonic()
        if as_json:
            self.setFormatter(_Json())

    def emit(self, record: logging.LogRecord) -> None:
        self.last = time.monotonic()
        super().emit(record)


class _Json(logging.Formatter):
    """The names of the fields are Cloud Logging's (https://cloud.google.com/logging/docs/structured-logging)."""

    def format(self, record: logging.LogRecord) -> str:
        return json_line(record.levelname, record.getMessage(), getattr(record, "fields", {}))


def json_line(severity: str, message: str, fields: Mapping[str, Any]) -> str:
    """One log entry."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
    return json.dumps({"time": now, "severity": severity, "message": message, **fields}, ensure_ascii=True)


def wants_json(argv: Sequence[str]) -> bool:
    """Whether a command line asks for JSON, even if the rest of it makes no sense."""
    words = [word.removeprefix("--") for word in argv]
    pairs = itertools.pairwise([*words, ""])
    return any(word == "log_format=json" or (word, after) == ("log_format", "json") for word, after in pairs)


def error(message: str, exit_code: int, *, as_json: bool) -> None:
    """The one line that a failed run ends with."""
    text = f"converter: {message}"
    print(json_line("ERROR", text, {"exit_code": exit_code}) if as_json else text, file=sys.stderr, flush=True)


class Heartbeat:
    """While used as a context, says something at least every `HEARTBEAT_SECONDS`, whatever the phase.

    A progress bar moves by itself, so on a terminal there is none.
    """

    def __init__(self, phases: Phases, monitor: Monitor) -> None:
        self._phases = phases
        self._monitor = monitor
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._retries = 0
        self._retries_told = time.monotonic()

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(min(1.0, HEARTBEAT_SECONDS / 5)):
            self._tell_retries()
            last = max((handler.last for handler in log.handlers if isinstance(handler, Handler)), default=None)
            if last is None or sys.stderr.isatty() or time.monotonic() - last < HEARTBEAT_SECONDS:
                continue
            name, seconds = self._phases.current
            memory = self._monitor.current.anonymous
            log.info(
                "%s: %.0f s so far, memory %.2f GB",
                name,
                seconds,
                memory / 1e9,
                extra={"fields": {"phase": name, "phase_seconds": round(seconds, 1), "memory_bytes": memory}},
            )

    def _tell_retries(self) -> None:
        """TensorStore tries again without a word; once a minute there is one."""
        if time.monotonic() - self._retries_told < _RETRIES_SECONDS:
            return
        self._retries_told = time.monotonic()
        count = _tensorstore_retries()
        if count > self._retries:
            log.warning(
                "the bucket fails now and then: %d requests for data were tried again in the last minute",
                count - self._retries,
                extra={"fields": {"phase": self._phases.current[0], "retries": count - self._retries}},
            )
        self._retries = count


def _tensorstore_retries() -> int:
    tensorstore = sys.modules.get("tensorstore")
    if tensorstore is None:
        return 0
    collect: Callable[[str], list[dict[str, Any]]] = tensorstore.experimental_collect_matching_metrics
    return sum(value["value"] for metric in collect(_RETRIES_METRIC) for value in metric["values"])
