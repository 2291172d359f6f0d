"""Where things lie in a MaxText checkpoint."""

STEP = "0"
"""Directory of the only step."""

ITEM = "items"
"""Directory of the pytree below the step."""

ROOT = "params."
"""Prefix of the variables' names: where MaxText's TrainState keeps them. Below it come the collections."""

PARAMS = "params."
"""Collection of the parameters proper."""
