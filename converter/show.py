"""Tables for people: a plan, a checkpoint, the models."""

from __future__ import annotations

from collections.abc import Sequence

from converter.fetching import Reads
from converter.maxtext.devices import Partition
from converter.plan import ArrayPlan, Plan
from converter.schedule import Schedule


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns as wide as their longest cell; numbers to the right."""
    cells = [
        list(header),
        *([f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row] for row in rows),
    ]
    widths = [max(len(line[i]) for line in cells) for i in range(len(header))]
    right = [all(isinstance(row[i], int) for row in rows) and bool(rows) for i in range(len(header))]

    def line(parts: Sequence[str]) -> str:
        padded = (
            part.rjust(width) if to_right else part.ljust(width)
            for part, width, to_right in zip(parts, widths, right, strict=True)
        )
        return "  ".join(padded).rstrip()

    return "\n".join([line(cells[0]), line(["-" * width for width in widths]), *map(line, cells[1:])])


def shape_text(shape: Sequence[int]) -> str:
    return "(" + ", ".join(map(str, shape)) + ")"


def partition_text(partition: Partition | None) -> str:
    """`none` without sharding, `replicated`, or the axis that is cut."""
    if partition is None:
        return "none"
    axis = next((i for i, name in enumerate(partition) if name is not None), None)
    return "replicated" if axis is None else f"axis {axis}"


def _sources(array: ArrayPlan) -> str:
    names = [piece.tensor for piece in array.parameter.pieces]
    distinct = list(dict.fromkeys(names))
    if not distinct:
        return "constant"
    return distinct[0] if len(distinct) == 1 else f"{distinct[0]} .. {distinct[-1]} ({len(distinct)})"


def show_plan(plan: Plan, schedule: Schedule, stored: int, reads: Reads | None = None) -> None:
    """Print what a conversion would write and take.

    Args:
      stored: expected bytes on disk.
      reads: what comes over the network, None where the source is here.
    """
    rows = [
        (
            array.name,
            shape_text(array.shape),
            array.dtype.name,
            partition_text(array.partition),
            shape_text(array.chunk_shape),
            len(list(array.chunks())),
            array.nbytes,
            schedule.passes(array),
            _sources(array),
        )
        for array in sorted(plan.arrays, key=lambda array: array.name)
    ]
    header = ("array", "shape", "dtype", "sharding", "chunk", "chunks", "bytes", "reads", "sources")
    print(table(header, rows))
    print()
    print(f"{len(plan.arrays)} arrays, {plan.nbytes:,} bytes, over {plan.devices} devices")
    print(f"largest chunk: {plan.largest_chunk:,} bytes; chunks in flight: {schedule.budget:,} bytes")
    print(f"predicted peak memory (anonymous): {schedule.peak_memory:,} bytes")
    print(f"expected on disk: {stored:,} to {plan.nbytes:,} bytes")
    most = max((schedule.passes(array) for array in plan.arrays if array.strided), default=1)
    if reads is not None:
        print(f"to be read over the network: {reads.nbytes:,} bytes, without a local cache")
        if reads.spool is not None:
            print(f"kept in {reads.spool} while it is needed again: at most {reads.spool_bytes:,} bytes")
        elif reads.spool_bytes:
            print(
                f"read up to {most} times over the network: give --spool_dir a directory with {reads.spool_bytes:,} "
                "bytes of disk, or a larger --memory_budget"
            )
    elif most > 1:
        print(
            f"sources are walked up to {most} times: from the page cache where it holds the tensors of one array, "
            "from disk where it does not; a larger --memory_budget walks them less often"
        )
