"""How fast quantised sources are decoded, on one core: `python -m benchmarks.decoding`.

Every format is decoded as a conversion does it: bands of columns, as scanned arrays are cut, in boxes of at most a
megabyte, into memory and nowhere else. The source is random and in the page cache. Seconds are of CPU time.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import markdown
from converter.hf.decoding import TASK_BYTES, decode
from converter.hf.quantised import Weights, open_weights
from converter.hf.repository import NUMPY_DTYPES, locate, open_repository

ROWS, COLUMNS = 4096, 7168
"""Of each matrix, as in DeepSeek-V3."""

BANDS = 2, 16
"""Into how many bands of columns it is cut."""

Entries = Mapping[str, tuple[str, tuple[int, ...]]]
"""Tensor -> its safetensors dtype and shape."""

_ROW_SCALES: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}},
}

FORMATS: Mapping[str, tuple[Mapping[str, Any], Entries]] = {
    "FP8, a scale for 128 x 128": (
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        {"w": ("F8_E4M3", (ROWS, COLUMNS)), "w_scale_inv": ("F32", (ROWS // 128, COLUMNS // 128))},
    ),
    "FP8, a scale for a row": (
        _ROW_SCALES,
        {"w": ("F8_E4M3", (ROWS, COLUMNS)), "w_scale": ("F32", (ROWS, 1))},
    ),
    "FP8, one scale": (
        {"quant_method": "fp8", "weight_block_size": None},
        {"w": ("F8_E4M3", (ROWS, COLUMNS)), "w_scale_inv": ("F32", ())},
    ),
    "MXFP4": (
        {"quant_method": "mxfp4"},
        {"w_blocks": ("U8", (ROWS, COLUMNS // 32, 16)), "w_scales": ("U8", (ROWS, COLUMNS // 32))},
    ),
}
"""What is measured: quantization_config and tensors, the codes first."""


def main() -> int:
    """Print the table."""
    rows = []
    for name, (quantization, entries) in FORMATS.items():
        with tempfile.TemporaryDirectory() as folder:
            _write(Path(folder), quantization, entries)
            opened = open_repository(locate(folder, revision=None, token=None))
            rates = [
                f"{_rate(open_weights(opened, NUMPY_DTYPES[code]), bands):.0f}"
                for code in ("BF16", "F32")
                for bands in BANDS
            ]
        rows.append((name, *rates))
    header = [f"{dtype}, 1/{bands} of the columns" for dtype in ("bfloat16", "float32") for bands in BANDS]
    print(markdown(("format", *header), rows))
    return 0


def _write(folder: Path, quantization: Mapping[str, Any], entries: Entries) -> None:
    generator = np.random.default_rng(0)
    header: dict[str, Any] = {}
    data = b""
    makers: Mapping[str, Callable[[tuple[int, ...]], np.ndarray]] = {
        "F8_E4M3": lambda shape: generator.integers(0, 127, shape, np.uint8),
        "U8": lambda shape: generator.integers(0, 256, shape, np.uint8),
        "F32": lambda shape: generator.uniform(1e-4, 1e-3, shape).astype(np.float32),
    }
    for name, (dtype, shape) in entries.items():
        values = makers[dtype](shape)
        if name.endswith("_scales"):
            # As narrow as in published weights.
            values = values % 12 + 112
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + values.nbytes]}
        data += values.tobytes()
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization}))


def _boxes(bands: int, itemsize: int) -> Iterator[tuple[slice, slice]]:
    width = COLUMNS // bands
    step = max(1, TASK_BYTES // (width * itemsize))
    for left in range(0, COLUMNS, width):
        for first in range(0, ROWS, step):
            yield slice(first, min(first + step, ROWS)), slice(left, left + width)


def _rate(weights: Weights, bands: int) -> float:
    """MB of bfloat16 a second of CPU: twice the millions of numbers, whatever they are decoded to. Best of five."""
    ((_, encoding),) = weights.encodings.items()
    best = math.inf
    for _ in range(5):
        start = time.process_time()
        for box in _boxes(bands, weights.dtype.itemsize):
            decode(weights.repository, encoding, box, weights.dtype)
        best = min(best, time.process_time() - start)
    return 2 * ROWS * COLUMNS / best / 1e6


if __name__ == "__main__":
    sys.exit(main())
