"""`inspect`: the arrays of a checkpoint as a table or JSON."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from converter.maxtext.checkpoint import Checkpoint, StoredArray, find_checkpoint, stored_arrays
from converter.show import shape_text, table


@dataclass(frozen=True)
class Description:
    """A checkpoint and its arrays."""

    checkpoint: Checkpoint
    arrays: list[StoredArray]

    def entry(self) -> dict[str, Any]:
        """The same as JSON."""
        return {
            "path": str(self.checkpoint.items),
            "ocdbt": self.checkpoint.ocdbt,
            "zarr3": self.checkpoint.zarr3,
            "custom_metadata": dict(self.checkpoint.custom_metadata),
            "bytes": sum(array.nbytes for array in self.arrays),
            "stored_bytes": sum(array.stored for array in self.arrays),
            "arrays": [
                {
                    "name": array.name,
                    "shape": list(array.shape),
                    "dtype": array.dtype,
                    "sharding": array.sharding,
                    "write_shape": list(array.write_shape),
                    "chunk_shape": list(array.chunk_shape),
                    "bytes": array.nbytes,
                    "stored_bytes": array.stored,
                }
                for array in self.arrays
            ],
        }


def describe(path: Path) -> Description:
    """Read the metadata of the checkpoint at `path`."""
    checkpoint = find_checkpoint(path)
    return Description(checkpoint, stored_arrays(checkpoint))


def show(description: Description) -> str:
    """The table and the totals."""
    checkpoint, arrays = description.checkpoint, description.arrays
    rows = [
        (
            array.name,
            shape_text(array.shape),
            array.dtype,
            shape_text(array.write_shape),
            shape_text(array.chunk_shape),
            array.nbytes,
            array.stored,
            array.sharding or "None",
        )
        for array in arrays
    ]
    header = ("array", "shape", "dtype", "write shape", "chunk shape", "bytes", "stored", "sharding")
    nbytes = sum(array.nbytes for array in arrays)
    stored = sum(array.stored for array in arrays)
    layout = f"{'OCDBT' if checkpoint.ocdbt else 'a directory per array'}, {'zarr3' if checkpoint.zarr3 else 'zarr2'}"
    return (
        f"{checkpoint.items} ({layout}, custom metadata {dict(checkpoint.custom_metadata)})\n\n"
        f"{table(header, rows)}\n\n"
        f"{len(arrays)} arrays, {nbytes:,} bytes in {stored:,} stored"
    )
