"""Where things lie in a MaxText checkpoint."""

STEP = "0"
"""Directory of the only step."""

ITEM = "items"
"""Directory of the pytree below the step."""

ROOT = "params."
"""Prefix of the variables' names: where MaxText's TrainState keeps them. Below it come the collections."""

PARAMS = "params."
"""Collection of the parameters proper."""

COMMITTED = "commit_success.txt"
"""Object that makes a folder of a bucket a checkpoint to Orbax (COMMIT_SUCCESS_FILE of its atomicity_types.py)."""
