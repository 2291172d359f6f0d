"""`to-maxtext` as a process: words in, log lines and files for programs out."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path

from converter import memory, places, report
from converter.convert import Outcome, convert
from converter.errors import ConverterError, RequestError, Terminated, error_line
from converter.logs import Heartbeat
from converter.progress import Phases
from converter.request import Request, make_request
from converter.words import Words, parse_words

log = logging.getLogger("converter")


def run_conversion(argv: Sequence[str]) -> int:
    """Parse, convert, report; the exit code.

    Raises:
      ConverterError, Terminated: after the termination message is written.
    """
    start = time.monotonic() - memory.process_age()
    phases = Phases()
    phases.seconds["start"] = time.monotonic() - start
    request: Request | None = None
    outcome: Outcome | None = None
    failure: BaseException | None = None
    message = _message_path(argv)
    with memory.Monitor() as monitor:
        try:
            words = parse_words(argv)
            message = _checked_message_path(words)
            request = make_request(words)
            for note in request.notes:
                log.info("%s", note)
            with Heartbeat(phases, monitor):
                outcome = convert(request, monitor, phases)
        except BaseException as error:
            failure = error
            raise
        finally:
            seconds = time.monotonic() - start
            if message is not None:
                _write_message(message, request, outcome, failure, seconds, monitor.peak)
    _tell(request, outcome, phases, seconds, monitor.peak)
    return 0


def _message_path(argv: Sequence[str]) -> Path | None:
    """Where the termination message goes even if the rest of the command line makes no sense."""
    words = list(argv)
    for i, word in enumerate(words):
        name, equals, text = word.removeprefix("--").partition("=")
        if name == "termination_message" and (equals or i + 1 < len(words)):
            path = Path(text if equals else words[i + 1]).expanduser()
            return path if _is_directory(path.parent) else None
    return None


def _checked_message_path(words: Words) -> Path | None:
    text = words.values["termination_message"]
    if not text:
        return None
    if "://" in text:
        raise RequestError(f"termination_message={text}: only a local file can be read by whoever runs this")
    path = Path(text).expanduser()
    if not _is_directory(path.parent):
        raise RequestError(f"termination_message={text}: there is no such directory")
    # A kubelet mounts a file of its own: it can be written, but not be replaced nor have others beside it.
    if not os.access(path, os.W_OK):
        places.check_writable(path.parent)
    return path


def _is_directory(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:
        return False


def _write_message(
    path: Path,
    request: Request | None,
    outcome: Outcome | None,
    failure: BaseException | None,
    seconds: float,
    peak: memory.Usage,
) -> None:
    if failure is None:
        code, error = 0, None
    elif isinstance(failure, ConverterError | Terminated):
        code, error = failure.exit_code, error_line(failure) or "ended by SIGTERM"
    elif isinstance(failure, KeyboardInterrupt):
        code, error = 130, "interrupted"
    else:
        code, error = 1, f"{type(failure).__name__}: {' '.join(str(failure).split())}"
    content = report.termination_message(
        result=outcome.result if outcome else "failed",
        exit_code=code,
        error=error,
        seconds=seconds,
        nbytes=outcome.nbytes if outcome and outcome.result == "converted" else 0,
        peak=peak,
        output=str(request.step) if request else None,
    )
    try:
        places.write_file(path, content)
    except OSError as error_:
        log.warning("the termination message cannot be written to %s: %s", path, error_)


def _tell(request: Request, outcome: Outcome, phases: Phases, seconds: float, peak: memory.Usage) -> None:
    """The last lines of a run."""
    if outcome.result == "converted":
        fields = {
            "phase": "done",
            "bytes": outcome.nbytes,
            "seconds": {name: round(value, 3) for name, value in phases.seconds.items()},
            "peak_memory_bytes": peak.anonymous,
        }
        log.info("saved %s: %.2f GB of arrays", request.step, outcome.nbytes / 1e9, extra={"fields": fields})
        spent = ", ".join(f"{name} {value:.1f} s" for name, value in phases.seconds.items())
        log.info("time: %.1f s (%s)", seconds, spent)
    cgroup = memory.cgroup_peak()
    log.info(
        "Peak memory: %.2f GB resident, %.2f GB anonymous + shared%s",
        peak.resident / 1e9,
        peak.anonymous / 1e9,
        "" if cgroup is None else f", {cgroup / 1e9:.2f} GB cgroup",
    )
    if outcome.command is not None:
        print(f"load it in MaxText with:\n{outcome.command}")
