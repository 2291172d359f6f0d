"""One conversion from the request to the finished checkpoint."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from converter import fetching, memory, merging, output, places, report, termination
from converter.adapters import (
    Uniform,
    adapter_parameters,
    adapter_reader,
    check_base,
    module_path,
    place,
    uniform,
)
from converter.command import load_command, restore_command
from converter.errors import ConverterError, RequestError, WorldError
from converter.fetching import Reads, adapter_held, plan_reads, reading_ahead
from converter.geometry import check_tensors, make_geometry
from converter.hf.adapter import Adapter, base_config, locate_adapter, open_adapter
from converter.hf.quantised import Weights, open_weights
from converter.hf.repository import NUMPY_DTYPES, Repository, Source, locate, open_repository
from converter.mapping import Parameter, parameters
from converter.maxtext import devices
from converter.maxtext.checkpoint import is_complete
from converter.maxtext.layout import ITEM, PARAMS, ROOT
from converter.maxtext.orbax import Storage, Store, Write, save
from converter.plan import Plan, make_plan
from converter.progress import Meter, Phases
from converter.reading import ReadBox, box_reader
from converter.request import Request
from converter.schedule import MAPPED, Schedule, make_schedule
from converter.show import show_plan
from converter.stream import Writer

log = logging.getLogger("converter")

SAVE_DTYPES = {"bfloat16": NUMPY_DTYPES["BF16"], "float32": NUMPY_DTYPES["F32"]}

_ORBAX_THREADS = ("streamed_arrays", "np_type_handler", "write_metadata")
"""How the names of the threads begin in which Orbax saves."""

_REMOTE_BYTES = 24_000_000
"""Memory that the libraries for HTTP and credentials take, for a source and for an output."""

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
    """Everything known before the first byte is written.

    Attributes:
      weights: what is read: the model, or the adapter that is converted alone.
      reads: over the network.
      read: gives its content, an adapter merged into it.
      in_memory: tensors of which what is read is made in memory, decoded or merged.
      adapter: that is merged.
      metadata: of the step.
      command: loads the result in MaxText.
    """

    weights: Weights
    plan: Plan
    schedule: Schedule
    reads: Reads | None
    read: ReadBox
    in_memory: frozenset[str]
    adapter: Adapter | None
    metadata: Mapping[str, Any]
    command: str


@dataclass(frozen=True)
class _Sources:
    """What a request names, found.

    Attributes:
      model: None where an adapter is converted alone.
      adapter: None where there is none.
      config: the base's config.json, of an adapter alone.
    """

    model: Source | None
    adapter: Source | None
    config: Mapping[str, Any] | None

    @property
    def identity(self) -> Mapping[str, Any]:
        """What their content is known by."""
        if self.adapter is None:
            assert self.model is not None, "something is converted"
            return self.model.identity
        base = self.config if self.model is None else self.model.identity
        return {"base": base, "adapter": self.adapter.identity}

    def fetch(self, *, dry_run: bool) -> _Sources:
        """The same with their files here, if they are to be; only headers are needed for a plan."""
        model = self.model and (self.model.streamed() if dry_run else self.model.fetch())
        adapter = self.adapter and (self.adapter.streamed() if dry_run else self.adapter.fetch())
        return _Sources(model, adapter, self.config)


def _locate(request: Request) -> _Sources:
    adapter = request.adapter
    if adapter is None:
        assert request.source is not None, "a model has a repository"
        return _Sources(locate(request.source, revision=request.revision, access=request.access), None, None)
    found = locate_adapter(adapter.source, revision=adapter.revision, access=request.access)
    if adapter.merge:
        assert request.source is not None, "a model has a repository"
        return _Sources(locate(request.source, revision=request.revision, access=request.access), found, None)
    if request.source is None:
        config = {"architectures": list(request.family.architectures[:1]), **request.model.config}
    else:
        # Whether the base is stored quantised does not matter to what is added to it.
        config = base_config(request.source, revision=None, access=request.access) | {"quantization_config": None}
    return _Sources(None, found, config)


def convert(request: Request, monitor: memory.Monitor, phases: Phases) -> Outcome:
    """Carry a request out.

    Raises:
      ConverterError: with the line for the user and the exit code.
    """
    with phases.phase("plan"):
        sources = _locate(request)
        if request.adapter is not None and request.adapter.merge and sources.adapter is not None:
            fetching.check_adapter(sources.adapter, request.spool)
        fingerprint = request.fingerprint(sources.identity)
        if not request.dry_run:
            if output.interrupted(request.output):
                with output.opened(request.output):
                    log.info("%s: what a killed run left half done is set right", request.output)
            if _already_there(request, fingerprint):
                log.info("%s is complete and of the same request: nothing to do", request.step)
                return Outcome("skipped", 0, None)
            places.check_writable(request.output)
            if request.report is not None:
                places.check_file(request.report)
    with phases.phase("download"):
        sources = sources.fetch(dry_run=request.dry_run)
    with phases.phase("plan"):
        adapter = open_adapter(sources.adapter) if sources.adapter else None
        if adapter is not None and sources.config is not None:
            planned = _plan_adapter(request, adapter, sources.config)
        else:
            assert sources.model is not None, "a model is converted"
            planned = _plan_model(request, open_repository(sources.model), adapter)
    if request.dry_run:
        show_plan(planned.plan, planned.schedule, expected_stored(planned.plan), planned.reads)
        return Outcome("planned", planned.plan.nbytes, None)
    places.check_space(request.output, expected_stored(planned.plan))
    with contextlib.ExitStack() as held:
        if planned.adapter is not None:
            with phases.phase("download"):
                held.enter_context(adapter_held(planned.adapter.repository, request.spool, request.threads))
        hold = held.enter_context(output.opened(request.output))
        if _already_there(request, fingerprint):
            log.info("%s was completed by another converter meanwhile: nothing to do", request.step)
            return Outcome("skipped", 0, None)
        _write(request, planned, fingerprint, monitor, phases, hold)
    return Outcome("converted", planned.plan.nbytes, planned.command)


def _plan_model(request: Request, repository: Repository, adapter: Adapter | None) -> _Planned:
    """The plan for an opened repository, with an adapter to merge or none."""
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
    check_tensors(request.family, geometry, weights, content=not request.dry_run or repository.remote is None)
    read, in_memory = box_reader(weights), set(weights.encodings)
    if adapter is not None:
        check_base(request.family, request.model_name, adapter)
        placed = place(request.family, geometry, adapter, weights.tensors)
        read = merging.merging_reader(read, adapter, placed)
        in_memory.update(placed)
    plan, schedule = _scheduled(request, made, weights, ROOT, adapter)
    return _Planned(
        weights,
        plan,
        schedule,
        plan_reads(weights, schedule, in_memory, request.spool),
        read,
        frozenset(in_memory),
        adapter,
        {"scan_layers": request.scan},
        load_command(request, geometry),
    )


def _plan_adapter(request: Request, adapter: Adapter, config: Mapping[str, Any]) -> _Planned:
    """The plan for an adapter alone, of a base with this config.json."""
    assert request.adapter is not None, "an adapter is converted"
    check_base(request.family, request.model_name, adapter)
    geometry = make_geometry(request, config)
    settings = uniform(adapter)
    made = adapter_parameters(
        request.family,
        geometry,
        adapter,
        rank=settings.rank,
        save_dtype=SAVE_DTYPES[request.save_dtype],
        scan=request.scan,
        scan_axis=request.scan_axis,
    )
    root = ROOT
    if request.adapter.layout == "maxtext":
        root = ""
        made = [replace(parameter, path=parameter.path.removeprefix(PARAMS)) for parameter in made]
    weights = open_weights(adapter.repository, SAVE_DTYPES[request.save_dtype])
    plan, schedule = _scheduled(request, made, weights, root)
    return _Planned(
        weights,
        plan,
        schedule,
        plan_reads(weights, schedule, (), request.spool),
        adapter_reader(box_reader(weights), settings.factors),
        frozenset(),
        None,
        {"scan_layers": request.scan, "lora": _lora_metadata(settings, made)},
        restore_command(request, geometry, settings.rank, settings.alpha, module_path(made)),
    )


def _lora_metadata(settings: Uniform, made: list[Parameter]) -> dict[str, Any]:
    """What MaxText's restore_lora_from_path looks for in a step's custom metadata, by the names of its words."""
    return {"lora_rank": settings.rank, "lora_alpha": settings.alpha, "lora_module_path": module_path(made)}


def _scheduled(
    request: Request, made: list[Parameter], weights: Weights, root: str, merged: Adapter | None = None
) -> tuple[Plan, Schedule]:
    """The plan and its schedule.

    Args:
      merged: the adapter that is merged.
    """
    repository = weights.repository
    storage = Storage(request.ocdbt, request.zarr3, request.compression, request.chunk_bytes)
    plan = make_plan(
        made, repository.positions(), devices=request.devices, scan=request.scan, storage=storage, root=root
    )
    reading, cached = MAPPED, memory.limit()
    if repository.remote is not None:
        nbytes = sum(tensor.nbytes for tensor in repository.tensors.values())
        reading = fetching.reading(request.threads, nbytes, plan.largest_chunk)
        # Without a spool nothing is as good as a page cache: the larger the groups, the less is read again.
        cached = cached if request.spool is not None else 0
    remote = repository.remote is not None or (merged is not None and merged.repository.remote is not None)
    libraries = _REMOTE_BYTES * (remote + places.is_remote(request.output))
    reading = replace(reading, memory=reading.memory + libraries + request.threads * weights.scratch_bytes)
    budget = request.memory_budget
    if budget is not None and budget < plan.largest_chunk:
        log.warning("memory_budget=%d is below the largest chunk: raised to its %d bytes", budget, plan.largest_chunk)
        budget = plan.largest_chunk
    return plan, make_schedule(plan, budget, request.threads, cached, reading, remote=places.is_remote(request.output))


def expected_stored(plan: Plan) -> int:
    """Bytes that the checkpoint takes on disk at least."""
    if not plan.storage.compression:
        return plan.nbytes
    return int(sum(array.nbytes / array.dtype.itemsize for array in plan.arrays) * _STORED_BYTES)


def _already_there(request: Request, fingerprint: str) -> bool:
    """Whether the output is there and may stay; raises where it may not."""
    step = request.step
    if not places.is_taken(step):
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


def _write(
    request: Request,
    planned: _Planned,
    fingerprint: str,
    monitor: memory.Monitor,
    phases: Phases,
    hold: output.Hold,
) -> None:
    plan, weights, repository = planned.plan, planned.weights, planned.weights.repository
    remote = repository.remote
    adapter = planned.adapter.repository if planned.adapter else None
    devices.start(request.devices)
    if planned.schedule.returns_memory:
        memory.return_large_blocks()
    digests = report.Digests()
    stop = threading.Event()
    target = output.target(request.output, overwrite=request.if_exists == "overwrite")
    termination.finish(lambda: hold.begin(target))
    with Meter("converting", plan.nbytes, monitor) as meter:
        writer = Writer(
            planned.schedule,
            planned.read,
            planned.in_memory,
            weights.prefetch if not remote and planned.schedule.rereads(memory.limit()) else None,
            remote.reached if remote is not None else None,
            digests.add if request.report is not None else None,
            meter.add,
            stop,
        )

        def write(store: Store) -> Mapping[str, bytes]:
            with (
                phases.phase("write"),
                reading_ahead(weights, planned.schedule, planned.in_memory, planned.reads, stop),
            ):
                writer.write(store)
            if remote is not None:
                with phases.phase("check"):
                    remote.check()
            return {output.RECORD: report.record(request, repository, fingerprint, adapter)}

        _save(request, target, planned, write, stop, hold)
    with phases.phase("finish"):
        output.publish(request.output, target)
    if request.report is not None:
        content = report.report(
            request,
            repository,
            plan,
            adapter=adapter,
            fingerprint=fingerprint,
            digests=digests,
            stored_bytes=meter.stored,
            seconds=phases.seconds,
            peak=monitor.peak,
        )
        report.write(request.report, content, f"{request.step} is complete")


def _save(
    request: Request, target: Path, planned: _Planned, write: Write, stop: threading.Event, hold: output.Hold
) -> None:
    """Let Orbax save; nothing is written any more when this ends early, unless what was begun is abandoned."""
    others = set(threading.enumerate())
    # In a thread of its own, so that SIGTERM ends the wait and never interrupts Orbax half-way.
    pool = ThreadPoolExecutor(1, thread_name_prefix="save")
    saving = pool.submit(
        save,
        target,
        [array.leaf for array in planned.plan.arrays],
        planned.plan.storage,
        custom_metadata=planned.metadata,
        ts_context=places.context(target),
        write=write,
        window=planned.schedule.window,
    )
    try:
        while not saving.done():
            termination.check()
            wait([saving], timeout=0.1)
            hold.check()
        saving.result()
        termination.ignore()
    except BaseException as error:
        stop.set()
        wait([saving], timeout=places.stop_seconds(request.output))
        if not saving.done():
            # It waits for a bucket that does not answer, perhaps for minutes.
            hold.abandon()
            error.stuck = True  # type: ignore[attr-defined]
            raise
        if saving.exception() is None:
            hold.check()
            log.info("the signal came when everything was written: finishing")
            termination.ignore()
            return
        for thread in set(threading.enumerate()) - others:
            if thread.name.startswith(_ORBAX_THREADS):
                # They write on for a moment; their own join raises what ended them.
                threading.Thread.join(thread)
        if isinstance(error, Exception) and not isinstance(error, ConverterError):
            raise _failure(error, request) from error
        raise
    finally:
        pool.shutdown(wait=saving.done())


def _failure(error: Exception, request: Request) -> Exception:
    """What a failed write means for the user; anything unforeseen stays what it is, a bug."""
    text = " ".join(str(error).split())
    if foreseen := places.failure(request.output, text):
        return foreseen
    if "No space left" in text or "Disk quota" in text or "File too large" in text:
        return WorldError(f"no space left in {request.output} while writing; nothing was kept")
    if "Read-only file system" in text or "Permission denied" in text:
        return RequestError(f"cannot write to {request.output}: read-only or permission denied")
    if isinstance(error, OSError) or "Input/output error" in text:
        return WorldError(f"writing to {request.output} failed: {text[:300]}; nothing was kept")
    if isinstance(error, MemoryError):
        return WorldError("not enough memory; give a smaller --memory_budget or --chunk_byte_size")
    return error
