"""`to-maxtext` and `verify` as processes: words in, log lines and files for programs out."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from converter import memory, places, report, units
from converter.convert import Outcome, convert
from converter.errors import CheckError, ConverterError, RequestError, Terminated, WorldError, error_line
from converter.logs import Heartbeat
from converter.progress import Phases
from converter.request import Request, make_request
from converter.show import table
from converter.verification import Check, Findings, verify
from converter.words import parse_words

log = logging.getLogger("converter")


@dataclass
class _Ending:
    """What the termination message says of a run, filled in while it goes on."""

    path: Path | None
    result: str = "failed"
    nbytes: int = 0
    output: str | None = None
    checked: Mapping[str, int] | None = None


def run_conversion(argv: Sequence[str]) -> int:
    """Parse, convert, report; the exit code.

    Raises:
      ConverterError, Terminated: after the termination message is written.
    """
    start = time.monotonic() - memory.process_age()
    phases = _phases(start)
    with memory.Monitor() as monitor, _ending(argv, start, monitor) as ending:
        words = parse_words(argv)
        ending.path = _checked_message_path(words.values["termination_message"])
        request = make_request(words)
        ending.output = str(request.step)
        for note in request.notes:
            log.info("%s", note)
        with Heartbeat(phases, monitor):
            outcome = convert(request, monitor, phases)
        ending.result = outcome.result
        ending.nbytes = outcome.nbytes if outcome.result == "converted" else 0
    _tell(request, outcome, phases, time.monotonic() - start, monitor.peak)
    return 0


def run_verification(argv: Sequence[str], parse: Callable[[], tuple[Check, str | None]]) -> int:
    """Parse, compare, report; 0 where there are no differences.

    Args:
      parse: what is asked, and where the termination message goes.

    Raises:
      CheckError: there are.
      ConverterError, Terminated: after the termination message is written.
    """
    start = time.monotonic() - memory.process_age()
    phases = _phases(start)
    with memory.Monitor() as monitor, _ending(argv, start, monitor) as ending:
        check, message = parse()
        ending.path = _checked_message_path(message)
        ending.output = str(check.path)
        with Heartbeat(phases, monitor):
            findings = verify(check, monitor, phases)
        count = len(findings.differences)
        ending.output, ending.nbytes = str(findings.checkpoint.items), findings.nbytes
        ending.checked = {"arrays": findings.arrays, "differences": count}
        ending.result = "different" if count else "equal"
        _show(findings, check)
        if check.report is not None:
            content = report.verification(findings, seconds=phases.seconds, peak=monitor.peak)
            try:
                report.write(check.report, content, f"{findings.checkpoint.items} is compared")
            except WorldError as error:
                if not count:
                    raise
                log.warning("%s", error)
        if count:
            raise CheckError(
                f"{count} of {findings.arrays} arrays of {findings.checkpoint.items} differ from {check.sources}"
            )
    return 0


def _phases(start: float) -> Phases:
    phases = Phases()
    phases.seconds["start"] = time.monotonic() - start
    return phases


@contextlib.contextmanager
def _ending(argv: Sequence[str], start: float, monitor: memory.Monitor) -> Iterator[_Ending]:
    """Write the termination message, however the block ends."""
    ending = _Ending(_message_path(argv))
    failure: BaseException | None = None
    try:
        yield ending
    except BaseException as error:
        failure = error
        raise
    finally:
        if ending.path is not None:
            _write_message(ending.path, ending, failure, time.monotonic() - start, monitor.peak)


def _show(findings: Findings, check: Check) -> None:
    if check.as_json:
        print(json.dumps(findings.entry(), indent=1))
    elif findings.differences:
        print(table(("array", "difference"), [(found.name, found.what) for found in findings.differences]))
    else:
        print(f"{findings.arrays} arrays, {findings.nbytes:,} bytes: all equal to {check.sources}")


def _message_path(argv: Sequence[str]) -> Path | None:
    """Where the termination message goes even if the rest of the command line makes no sense."""
    words = list(argv)
    for i, word in enumerate(words):
        name, equals, text = word.removeprefix("--").partition("=")
        if name == "termination_message" and (equals or i + 1 < len(words)):
            path = Path(text if equals else words[i + 1]).expanduser()
            return path if _is_directory(path.parent) else None
    return None


def _checked_message_path(text: str | None) -> Path | None:
    if not text:
        return None
    if "://" in text:
        raise RequestError(f"termination_message={text}: only a local file can be read by whoever runs this")
    path = Path(text).expanduser()
    if not _is_directory(path.parent):
        raise RequestError(f"termination_message={text}: there is no such directory")
    if _is_directory(path):
        raise RequestError(f"termination_message={text}: it is a directory; give a file's name")
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
    ending: _Ending,
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
        result=ending.result,
        exit_code=code,
        error=error,
        seconds=seconds,
        nbytes=ending.nbytes,
        peak=peak,
        output=ending.output,
        checked=ending.checked,
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
        log.info("saved %s: %s of arrays", request.step, units.size(outcome.nbytes), extra={"fields": fields})
        spent = ", ".join(f"{name} {value:.1f} s" for name, value in phases.seconds.items())
        log.info("time: %.1f s (%s)", seconds, spent)
    cgroup = memory.cgroup_peak()
    log.info(
        "Peak memory: %s resident, %s anonymous + shared%s",
        units.size(peak.resident),
        units.size(peak.anonymous),
        "" if cgroup is None else f", {units.size(cgroup)} cgroup",
    )
    if outcome.command is not None:
        print(f"load it in MaxText with:\n{outcome.command}")
