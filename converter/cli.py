"""The command line: `python -m converter <command>`."""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from absl import logging as absl_logging

from converter import __version__, logs, memory, termination
from converter.errors import ConverterError, RequestError, Terminated, error_line
from converter.words import OPTIONS, suggest

if TYPE_CHECKING:
    from converter.verification import Check

log = logging.getLogger("converter")

_USAGE = """\
usage: python -m converter <command> ...

commands:
  to-maxtext   convert a Hugging Face checkpoint to a MaxText checkpoint
  inspect      list the arrays of a checkpoint
  verify       compare a checkpoint with the repository it was made from
  models       list the models that can be converted

`python -m converter <command> --help` tells more."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    commands: dict[str, Callable[[list[str]], int]] = {
        "to-maxtext": to_maxtext,
        "inspect": inspect,
        "verify": verify,
        "models": models,
    }
    if arguments and arguments[0] == "--version":
        print(__version__)
        return 0
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_USAGE)
        return 0 if arguments else 2
    command = arguments[0].replace("_", "-")
    if command not in commands:
        print(f"converter: error: unknown command {arguments[0]!r}{suggest(command, commands)}", file=sys.stderr)
        return 2
    return commands[command](arguments[1:])


def to_maxtext(argv: list[str]) -> int:
    """`to-maxtext`: the drop-in for MaxText's converter."""
    if any(word in ("-h", "--help") for word in argv):
        print("usage: python -m converter.to_maxtext [.../base.yml] key=value ... --flag=value ...\n")
        for name, option in OPTIONS.items():
            shown = f"--{name}" if option.own else name
            print(f"  {shown:32} {option.help}")
        return 0

    def run() -> int:
        # Imports make very many objects and no garbage: looking for it meanwhile and at the end takes 0.2 s.
        gc.disable()
        memory.use_one_heap()
        from converter.run import run_conversion

        gc.freeze()
        gc.enable()
        termination.install()
        return run_conversion(argv)

    return _guarded(run, as_json=logs.wants_json(argv))


def inspect(argv: list[str]) -> int:
    """`inspect`: what a checkpoint holds."""
    parser = _parser("inspect", "List every array of an Orbax checkpoint without loading data.")
    parser.add_argument("path", help="the checkpoint: its base directory, step or items directory, local or gs://")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(argv)

    def run() -> int:
        from converter import places
        from converter.inspection import describe, show

        description = describe(places.parse("path", options.path))
        print(json.dumps(description.entry(), indent=1) if options.json else show(description))
        return 0

    return _guarded(run)


def verify(argv: list[str]) -> int:
    """`verify`: a checkpoint against its source."""
    parser = _parser("verify", "Read every array back and compare it bit by bit with the Hugging Face repository.")
    parser.add_argument("path", help="the checkpoint: its base directory, step or items directory, local or gs://")
    parser.add_argument("--source", required=True, help="what it was made from, written as hf_model_path")
    parser.add_argument("--revision", help="branch, tag or commit on the hub")
    for name in ("cache_dir", "spool_dir", "retry_seconds", "report", "termination_message", "log_format"):
        parser.add_argument(f"--{name}", help=OPTIONS[name].help)
    parser.add_argument(
        "--hf_lora_adapter_path", help="LoRA adapter that was merged, or converted alone: source is then its base"
    )
    parser.add_argument("--adapter_revision", help="branch, tag or commit of the adapter on the hub")
    parser.add_argument("--model_name", help="needed where neither the checkpoint nor config.json tell")
    parser.add_argument("--threads", type=int, help="default: one per CPU")
    parser.add_argument("--json", action="store_true", help="print JSON")
    if any(word in ("-h", "--help") for word in argv):
        parser.print_help()
        return 0

    def parse() -> tuple[Check, str | None]:
        from converter import places
        from converter.request import make_access, make_spool
        from converter.verification import Check

        options = parser.read(argv)
        if options.adapter_revision and not options.hf_lora_adapter_path:
            raise RequestError("adapter_revision is for an adapter: give hf_lora_adapter_path, or drop it")
        values = {name: _parsed(name, getattr(options, name)) for name in ("cache_dir", "retry_seconds", "log_format")}
        check = Check(
            places.parse("path", options.path),
            source=options.source,
            revision=options.revision,
            access=make_access(values),
            spool=make_spool(options.spool_dir),
            adapter=options.hf_lora_adapter_path,
            adapter_revision=options.adapter_revision,
            model_name=options.model_name,
            threads=options.threads,
            report=places.parse("report", options.report) if options.report else None,
            as_json=options.json,
        )
        return check, options.termination_message

    def run() -> int:
        from converter.run import run_verification

        termination.install()
        return run_verification(argv, parse)

    return _guarded(run, as_json=logs.wants_json(argv))


def _parsed(name: str, text: str | None) -> Any:
    """An option of `to-maxtext` given to another command."""
    try:
        return OPTIONS[name].default if text is None else OPTIONS[name].parse(text)
    except ValueError as error:
        raise RequestError(f"--{name}={text}: {error}") from None


def models(argv: list[str]) -> int:
    """`models`: what can be converted."""
    parser = _parser("models", "List the models that can be converted.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(argv)

    def run() -> int:
        from converter.listing import entries, show

        print(json.dumps(entries(), indent=1) if options.json else show())
        return 0

    return _guarded(run)


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        raise RequestError(f"{message}; see {self.prog} --help")

    def read(self, args: Sequence[str]) -> argparse.Namespace:
        """The words as a namespace; raises RequestError where they make no sense."""
        return super().parse_args(args)

    def parse_args(self, args: Sequence[str] | None = None, namespace: None = None) -> argparse.Namespace:  # type: ignore[override]
        try:
            return super().parse_args(args, namespace)
        except RequestError as error:
            print(f"converter: error: {error}", file=sys.stderr)
            sys.exit(error.exit_code)


def _parser(command: str, description: str) -> _Parser:
    return _Parser(prog=f"python -m converter {command}", description=description, allow_abbrev=False)


def _guarded(run: Callable[[], int], *, as_json: bool = False) -> int:
    """Run, turning every way to fail into one line on stderr and an exit code."""
    signal.signal(signal.SIGTERM, _end)
    log.setLevel(logging.INFO)
    log.propagate = False
    log.handlers = [logs.Handler(as_json=as_json)]
    # Orbax logs every failure in each of its threads, with a traceback; ours is the one line the user gets.
    absl_logging.get_absl_logger().disabled = True
    # numpy's BLAS would start threads that spin for a while; nothing here multiplies matrices.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        return run()
    except ConverterError as error:
        logs.error(f"error: {error_line(error)}", error.exit_code, as_json=as_json)
        if error.stuck:
            _exit_now(error.exit_code)
        return error.exit_code
    except Terminated as error:
        logs.error(f"ended by SIGTERM; {_left(error)}", error.exit_code, as_json=as_json)
        _exit_now(error.exit_code)
    except KeyboardInterrupt as error:
        logs.error(f"interrupted; {_left(error)}", 130, as_json=as_json)
        _exit_now(130)
    except BrokenPipeError:
        sys.stderr.close()
        return 0
    except Exception as error:
        if not as_json:
            traceback.print_exc()
        text = f"{type(error).__name__}: {error}" if not as_json else traceback.format_exc()
        logs.error(f"error: this is a bug: {text}", 1, as_json=as_json)
        return 1


def _left(ended: BaseException) -> str:
    """What a signal has left behind."""
    stuck = getattr(ended, "stuck", False)
    return "what is half done is left for the next run to remove" if stuck else "nothing partial was kept"


def _exit_now(code: int) -> NoReturn:
    """End the process without waiting for threads that may hang in a download; all else is cleaned up."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _end(number: int, frame: FrameType | None) -> None:
    """SIGTERM while there is nothing to clean up; an exception raised amid an import may get lost there."""
    os.write(2, b"converter: ended by SIGTERM; nothing was written\n")
    os._exit(Terminated.exit_code)
