"""Scripts that measure the converter: against `cp`, `zstd` and MaxText's own, on checkpoints of any supported size."""
