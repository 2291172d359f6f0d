"""One conversion from the request to the finished checkpoint."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from converter import memory, output, report
from converter.command import load_command
from converter.errors import ConverterError, RequestError, WorldError
from converter.geometry import check_tensors, make_geometry
from converter.hf.quantised import Weights, open_weights
from converter.hf.repository import NUMPY_DTYPES, Repository, locate, open_repository
from converter.mapping import Geometry, parameters
from converter.maxtext import devices
from converter.maxtext.checkpoint import is_complete
from converter.maxtext.layout import ITEM
from converter.maxtext.orbax import OpenArray, Storage, Write, save
from converter.plan import Plan, make_plan
from converter.progress import Meter, Phases
from converter.reading import box_reader
from converter.request import Request
from converter.schedule import Schedule, default_budget
from converter.show import show_plan
from converter.stream import Writer

log = logging.getLogger("converter")

SAVE_DTYPES = {"bfloat16": NUMPY_DTYPES["BF16"], "float32": NUMPY_DTYPES["F32"]}

_ORBAX_THREADS = ("streamed_arrays", "write_metadata")
"""How the names of the threads begin in which Orbax saves."""

_STORED_BYTES = 1.4
"""What zstd leaves of a weight at least, for the check of free space: 70 % of the two bytes that matter."""


@dataclass(frozen=True)
class Outcome:
    """How a conversion ended well.

    Attributes:
      result: converted, skipped or planned.
      nbytes: of the checkpoint's arrays.
      command: loads the checkpoint in MaxText; None when nothing is there to load.
    """

    result: str
    nbytes: int
    command: str | None


@dataclass(frozen=True)
class _Planned:
    """Everything known before the first byte is written."""

    weights: Weights
    geometry: Geometry
    plan: Plan
    schedule: Schedule


def convert(request: Request, monitor: memory.Monitor, phases: Phases) -> Outcome:
    """Carry a request out.

    Raises:
      ConverterError: with the line for the user and the exit code.
    """
    with phases.phase("plan"):
        source = locate(request.source, revision=request.revision, token=request.token)
        fingerprint = request.fingerprint(source.identity)
        if not request.dry_run:
            if output.half_swapped(request.output):
                with output.opened(request.output):
                    log.info("%s was being overwritten when a run was killed: the old one is back", request.step)
            if _already_there(request, fingerprint):
                log.info("%s is complete and of the same request: nothing to do", request.step)
                return Outcome("skipped", 0, None)
            output.check_writable(request.output)
            if request.report is not None:
                output.check_writable(request.report.parent)
    with phases.phase("download"):
        source = source.fetch(request.token)
    with phases.phase("plan"):
        planned = make_planned(request, open_repository(source))
    if request.dry_run:
        show_plan(planned.plan, planned.schedule, expected_stored(planned.plan))
        return Outcome("planned", planned.plan.nbytes, None)
    output.check_space(request.output, expected_stored(planned.plan))
    with output.opened(request.output):
        _write(request, planned, fingerprint, monitor, phases)
    return Outcome("converted", planned.plan.nbytes, load_command(request, planned.geometry))


def make_planned(request: Request, repository: Repository) -> _Planned:
    """The plan of a request for an opened repository."""
    geometry = make_geometry(request, repository.config)
    save_dtype = SAVE_DTYPES[request.save_dtype]
    weights = open_weights(repository, save_dtype)
    made = parameters(
        request.family,
        geometry,
        weights.tensors,
        save_dtype=save_dtype,
        scan=request.scan,
        scan_axis=request.scan_axis,
    )
    check_tensors(request.family, geometry, weights)
    storage = Storage(request.ocdbt, request.zarr3, request.compression, request.chunk_bytes)
    plan = make_plan(made, repository.positions(), devices=request.devices, scan=request.scan, storage=storage)
    scratch = weights.scratch_bytes
    budget = request.memory_budget or default_budget(plan, request.threads, memory.limit(), scratch)
    if budget < plan.largest_chunk:
        log.warning("memory_budget=%d is below the largest chunk: raised to its %d bytes", budget, plan.largest_chunk)
        budget = plan.largest_chunk
    return _Planned(weights, geometry, plan, Schedule(plan, budget, request.threads, scratch))


def expected_stored(plan: Plan) -> int:
    """Bytes that the checkpoint takes on disk at least."""
    if not plan.storage.compression:
        return plan.nbytes
    return int(sum(array.nbytes / array.dtype.itemsize for array in plan.arrays) * _STORED_BYTES)


def _already_there(request: Request, fingerprint: str) -> bool:
    """Whether the output is there and may stay; raises where it may not."""
    step = request.step
    if not step.exists() and not step.is_symlink():
        return False
    if not step.is_dir():
        raise RequestError(f"{step} is no directory; choose another base_output_directory")
    if request.if_exists == "refuse":
        raise RequestError(f"{step} exists; give --if_exists=skip or --if_exists=overwrite, or another directory")
    if request.if_exists == "overwrite":
        if not output.looks_like_checkpoint(step):
            raise RequestError(f"{step} is no checkpoint and will not be overwritten; move it away")
        return False
    record = output.read_record(step)
    if record is None or record.get("fingerprint") != fingerprint or not is_complete(step / ITEM):
        raise RequestError(
            f"{step} exists and is not the complete result of this request; "
            "give --if_exists=overwrite or another directory"
        )
    return True


def _write(request: Request, planned: _Planned, fingerprint: str, monitor: memory.Monitor, phases: Phases) -> None:
    plan, weights, repository = planned.plan, planned.weights, planned.weights.repository
    memory.use_few_arenas()
    devices.start(request.devices)
    if plan.largest_chunk >= memory.LARGE_CHUNK_BYTES:
        memory.return_large_blocks()
    digests = report.Digests()
    stop = threading.Event()
    target = output.target(request.output, overwrite=request.if_exists == "overwrite")
    with Meter("converting", plan.nbytes, monitor) as meter:
        writer = Writer(
            planned.schedule,
            box_reader(weights),
            weights.encodings,
            weights.prefetch if planned.schedule.rereads(memory.limit()) else None,
            digests.add if request.report is not None else None,
            meter.add,
            stop,
        )

        def write(arrays: list[OpenArray]) -> Mapping[str, bytes]:
            with phases.phase("write"):
                writer.write(arrays)
            return {output.RECORD: report.record(request, repository, fingerprint)}

        _save(request, target, plan, write, stop)
    with phases.phase("finish"):
        output.publish(request.output, target)
    if request.report is not None:
        content = report.report(
            request,
            repository,
            plan,
            fingerprint=fingerprint,
            digests=digests,
            stored_bytes=meter.stored,
            seconds=phases.seconds,
            peak=monitor.peak,
        )
        try:
            report.write_file(request.report, content)
        except OSError as error:
            raise WorldError(
                f"{request.step} is complete, but {request.report} cannot be written: {error.strerror or error}"
            ) from error


def _save(request: Request, target: Path, plan: Plan, write: Write, stop: threading.Event) -> None:
    """Let Orbax save; whatever ends it before its time leaves nothing behind."""
    others = set(threading.enumerate())
    # In a thread of its own, so that SIGTERM, which is raised in the main thread, never interrupts Orbax half-way.
    with ThreadPoolExecutor(1, thread_name_prefix="save") as pool:
        saving = pool.submit(
            save,
            target,
            [array.leaf for array in plan.arrays],
            plan.storage,
            custom_metadata={"scan_layers": request.scan},
            threads=request.threads,
            write=write,
        )
        try:
            while not saving.done():
                # Not for ever at once: a signal that arrives just before the wait begins would only be seen after it.
                wait([saving], timeout=0.1)
            saving.result()
            _finish_undisturbed()
        except BaseException as error:
            stop.set()
            wait([saving])
            if saving.exception() is None:
                log.info("the signal came when everything was written: finishing")
                _finish_undisturbed()
                return
            for thread in set(threading.enumerate()) - others:
                if thread.name.startswith(_ORBAX_THREADS):
                    # They write on for a moment; their own join raises what ended them.
                    threading.Thread.join(thread)
            output.remove_partial(request.output)
            if isinstance(error, Exception) and not isinstance(error, ConverterError):
                raise _failure(error, request) from error
            raise


def _finish_undisturbed() -> None:
    """Ignore SIGTERM from here on: what is left takes milliseconds, and the checkpoint is there."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _failure(error: Exception, request: Request) -> Exception:
    """What a failed write means for the user; anything unforeseen stays what it is, a bug."""
    text = " ".join(str(error).split())
    if "No space left" in text or "Disk quota" in text or "File too large" in text:
        return WorldError(f"no space left in {request.output} while writing; nothing was kept")
    if "Read-only file system" in text or "Permission denied" in text:
        return RequestError(f"cannot write to {request.output}: read-only or permission denied")
    if isinstance(error, OSError) or "Input/output error" in text:
        return WorldError(f"writing to {request.output} failed: {text[:300]}; nothing was kept")
    if isinstance(error, MemoryError):
        return WorldError("not enough memory; give a smaller --memory_budget or --chunk_byte_size")
    return error
