"""Where things lie in a MaxText checkpoint."""

STEP = "0"
"""Directory of the only step."""

ITEM = "items"
"""Directory of the pytree below the step."""

COMMITTED = "commit_success.txt"
"""Object that makes a folder of a bucket a checkpoint to Orbax (COMMIT_SUCCESS_FILE of its atomicity_types.py)."""

ROOT = "params.params."
"""Prefix of the parameters' names: where MaxText's TrainState keeps them."""
