"""Simulated devices and MaxText's sharding rule over them."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from converter.errors import RequestError

if TYPE_CHECKING:
    import jax

AXIS = "checkpoint_sharding_axis"
"""Name of the only mesh axis, as MaxText's converter calls it."""

MAX_DEVICES = 1024

Partition = tuple[str | None, ...]


def partition(shape: tuple[int, ...], devices: int) -> Partition | None:
    """MaxText's rule: axis 0 if divisible by the device count, else axis 1, else replicated; None with one device.

    Source: shard_jax_weights in MaxText 0.2.5, checkpoint_conversion/utils/utils.py.
    """
    if devices == 1:
        return None
    if not shape:
        return ()
    if shape[0] % devices == 0:
        return (AXIS,)
    if len(shape) > 1 and shape[1] % devices == 0:
        return (None, AXIS)
    return (None,)


def write_shape(shape: tuple[int, ...], devices: int) -> tuple[int, ...]:
    """What one device writes: its shard or, of a replicated array, its share.

    Orbax writes replicas in parallel: each of N devices writes one N-th along the first axis that N divides
    (calculate_replica_parallel_axis_and_local_shape in its replica_slices.py); without such an axis one writes all.
    """
    spec = partition(shape, devices)
    if spec is None:
        return shape
    axis = spec.index(AXIS) if AXIS in spec else next((i for i, n in enumerate(shape) if n % devices == 0), None)
    if axis is None:
        return shape
    return (*shape[:axis], shape[axis] // devices, *shape[axis + 1 :])


def start(devices: int) -> None:
    """Make JAX come up with this many CPU devices.

    Raises:
      RequestError: JAX is already up in this process with another number of devices.
    """
    import jax

    jax.config.update("jax_platforms", "cpu")
    # Refused once JAX is up; the count below then tells whether it matters.
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", devices)
    found = len(jax.devices())
    if found != devices:
        raise RequestError(
            f"JAX is already running in this process with {found} devices; "
            f"ask for {found} or start a process of its own for {devices}"
        )


def sharding(shape: tuple[int, ...], devices: int) -> jax.sharding.NamedSharding | None:
    """The JAX sharding that `partition` describes, over this process's devices."""
    import jax
    import numpy as np

    spec = partition(shape, devices)
    if spec is None:
        return None
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()), (AXIS,))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
