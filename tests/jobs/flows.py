"""What must work on every cluster: the same flows run against the stand-in here and against real ones in tests/e2e.

Each takes a `World`, which says how to run a command and how to make things happen to a Job's pod; the module that
imports the tests has a fixture of that name.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from commands import IMAGE, Command, Ran

MODEL = "qwen3-0.6b"
# What Kueue says, in the words of kueue/pkg/scheduler/flavorassigner and kueue/pkg/controller/core.
NO_ROOM = "insufficient unused quota for"
TOO_LARGE = "insufficient quota for"
NO_QUEUE = "doesn't exist"


@dataclass(frozen=True)
class World:
    """A cluster with the stack's objects.

    Attributes:
      jobs: runs `python -m jobs ...`.
      base: words that lead to the cluster and its namespace.
      nodes: Jobs that run at once.
      finish: makes a Job's pod end well.
      quota: gives the queue another quota of CPUs for as long as the context lasts.
      seconds: that the cluster may take to react.
    """

    jobs: Command
    base: tuple[str, ...]
    nodes: int
    finish: Callable[[str], None]
    quota: Callable[[str], AbstractContextManager[None]]
    seconds: float

    def run(self, *words: str) -> Ran:
        """A command on this cluster."""
        return self.jobs(*words, *self.base)

    def submit(self, run: str, *words: str, image: str = IMAGE) -> Ran:
        """Submit the small model as a run."""
        return self.run("submit", MODEL, "--image", image, "--run-name", run, "--skip-access-check", *words)

    def status(self, *words: str) -> dict[str, dict[str, Any]]:
        """Run -> what `status` says."""
        ran = self.run("status", "--json", *words)
        assert ran.code == 0, ran.err
        return {each["run"]: each for each in json.loads(ran.out)}

    def until(self, reached: Callable[[dict[str, dict[str, Any]]], bool], *words: str) -> dict[str, dict[str, Any]]:
        """The status once it is as wanted."""
        deadline = time.monotonic() + self.seconds
        while True:
            status = self.status(*words)
            if reached(status):
                return status
            assert time.monotonic() < deadline, json.dumps(status, indent=1)
            time.sleep(min(1.0, self.seconds / 50))


def test_as_many_run_as_there_are_nodes(world: World) -> None:
    """Of two Jobs more than nodes two wait with Kueue's reason, the rest has a node each, one's end admits the next."""
    runs = [f"many-{number:02}" for number in range(world.nodes + 2)]
    for run in runs:
        assert world.submit(run).code == 0

    def settled(status: dict[str, dict[str, Any]]) -> bool:
        started = [each for each in status.values() if each["node"]]
        told = [each for each in status.values() if NO_ROOM in each["reason"] and each["position"]]
        return len(started) == world.nodes and len(told) == 2

    status = world.until(settled)
    waiting = [run for run in runs if status[run]["state"] == "queued"]
    assert waiting == runs[-2:], "the oldest first"
    assert [status[run]["position"] for run in waiting] == [1, 2]
    assert len({each["node"] for each in status.values() if each["node"]}) == world.nodes, "a node each"
    world.finish(status[runs[0]]["job"])
    status = world.until(lambda found: bool(found[waiting[0]]["node"]))
    assert status[runs[0]]["state"] == "checked"
    assert status[waiting[1]]["state"] == "queued"
    assert status[waiting[1]]["position"] == 1
    ran = world.run("cancel", "--run-name", waiting[1])
    assert ran.code == 0
    assert waiting[1] not in world.status()


def test_a_wrong_queue_waits_and_says_why(world: World) -> None:
    assert world.submit("wrong-queue", "--queue", "nowhere").code == 0
    status = world.until(lambda found: NO_QUEUE in found["wrong-queue"]["reason"])
    assert status["wrong-queue"]["state"] == "queued"
    assert "nowhere" in status["wrong-queue"]["reason"]


def test_a_wrong_namespace_is_refused(world: World) -> None:
    ran = world.submit("wrong-namespace", "--namespace", "no-such-namespace")
    assert ran.code == 2
    assert "no-such-namespace" in ran.error


def test_more_than_the_quota_waits_and_says_why(world: World) -> None:
    """A pod for a machine larger than the whole queue."""
    with world.quota("60"):
        assert world.submit("too-large", "--machine-type", "c3-highmem-176").code == 0
        status = world.until(lambda found: TOO_LARGE in found["too-large"]["reason"])
        assert status["too-large"]["state"] == "queued"


def test_the_same_request_is_submitted_once(world: World) -> None:
    first = world.submit("twice")
    assert first.code == 0
    assert "created" in first.out
    second = world.submit("twice")
    assert second.code == 0
    assert "exists" in second.out
    assert len(world.status("--run-name", "twice")) == 1
    other = world.submit("twice", image=IMAGE.replace("0", "1"))
    assert other.code == 2
    assert "another request" in other.error
    assert "cancel" in other.error


def test_a_job_is_followed_to_its_end(world: World) -> None:
    assert world.submit("end").code == 0
    job = world.until(lambda found: bool(found["end"]["node"]), "--run-name", "end")["end"]["job"]
    late = world.run("wait", MODEL, "--run-name", "end", "--timeout", "0.2", "--interval", "0.1")
    assert late.code == 3
    assert "time is up" in late.error
    world.finish(job)
    ran = world.run("wait", MODEL, "--run-name", "end", "--interval", "0.2", "--timeout", str(world.seconds))
    assert ran.code == 0
    assert "checked" in ran.out


def test_cancelling_leaves_nothing(world: World) -> None:
    assert world.submit("gone").code == 0
    assert world.run("cancel", MODEL, "--run-name", "gone").code == 0
    world.until(lambda found: not found, "--run-name", "gone")
    again = world.run("cancel", MODEL, "--run-name", "gone")
    assert again.code == 0
    assert "not there" in again.out
