"""Where things lie in a MaxText checkpoint."""

STEP = "0"
"""Directory of the only step."""

ITEM = "items"
"""Directory of the pytree below the step."""

ROOT = "params.params."
"""Prefix of the parameters' names: where MaxText's TrainState keeps them."""
