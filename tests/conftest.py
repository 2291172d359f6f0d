"""What all tests share."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import buckets
import jax
import pytest
from buckets import Bucket, Server
from checkpoints import write_tiny
from forking import Forks
from running import DEVICES

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", DEVICES)


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of whoever runs the tests changes a conversion."""
    for key in os.environ:
        # The last one is what a conversion in this process has set for TensorStore.
        if key.startswith(("HF_", "M_", "JOBSET_NAME", "TENSORSTORE_CA_")):
            monkeypatch.delenv(key)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The tiny model of a name, written once; not to be changed."""
    made: dict[str, Path] = {}

    def folder(model_name: str) -> Path:
        if model_name not in made:
            made[model_name] = write_tiny(tmp_path_factory.mktemp("tiny") / model_name, model_name)
        return made[model_name]

    return folder


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """A server of buckets."""
    with buckets.running() as found:
        yield found


_numbers = itertools.count()


@pytest.fixture
def bucket(server: Server) -> Bucket:
    """An empty bucket."""
    return server.make_bucket(f"bucket-{next(_numbers)}")


@pytest.fixture(scope="session")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    """What starts conversions without their imports."""
    with Forks(tmp_path_factory.mktemp("said")) as found:
        yield found
