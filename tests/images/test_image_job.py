"""A rendered Job in the image: its containers, one after the other, as a kubelet runs them.

So the template, the image and the converter's command line cannot drift apart.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from buckets import Server
from containers import MODEL, ROOT, USER, Containers, finish, wait

from jobs.render import Container
from jobs.render import containers as containers_of

pytestmark = pytest.mark.slow

RUN = "conv-20260813T123008"
OUTPUT = "/output"


@dataclass(frozen=True)
class Pod:
    """One pod of a Job.

    Attributes:
      folder: for what lasts as long as the pod, its emptyDirs and termination messages.
      claim: the folder that stands for the PersistentVolumeClaim.
      mounts: what else its containers see, path -> here.
      env: what else is in their environment.
      network: podman's name of what they reach.
    """

    containers: Containers
    manifest: dict[str, Any]
    folder: Path
    claim: Path
    mounts: Mapping[str, Path] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    network: str = "none"

    def run(self, during: tuple[str, Callable[[], None]] | None = None) -> Iterator[tuple[str, int, str]]:
        """Name, exit code and standard error of each container until one fails; `during`, one's name and what to do
        while it runs."""
        for container in containers_of(self.manifest):
            process = self._start(container)
            if during and during[0] == container.name:
                during[1]()
            done = finish(process)
            yield container.name, done.returncode, done.stderr
            if done.returncode != 0:
                return

    def message(self, name: str) -> str:
        """A container's termination message."""
        return (self.folder / f"{name}.message").read_text()

    def _start(self, container: Container) -> subprocess.Popen[str]:
        self.folder.mkdir(exist_ok=True)
        message = self.folder / f"{container.name}.message"
        message.touch()
        message.chmod(0o666)
        [spec] = [each for each in self._specs() if each["name"] == container.name]
        memory = int(spec["resources"]["limits"]["memory"].removesuffix("Gi")) << 30
        return self.containers.start(
            *container.args,
            name=f"pod-{container.name}",
            entrypoint=container.command,
            env={**container.env, **self.env},
            mounts={path: self._volume(volume) for path, volume in container.mounts.items()}
            | {"/dev/termination-log": message, **self.mounts},
            network=self.network,
            memory=min(memory, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        )

    def _volume(self, name: str) -> Path:
        [volume] = [each for each in self.manifest["spec"]["template"]["spec"]["volumes"] if each["name"] == name]
        if "persistentVolumeClaim" in volume:
            return self.claim
        assert "emptyDir" in volume
        folder = self.folder / name
        if not folder.exists():
            folder.mkdir()
            # The kubelet gives it to the fsGroup.
            os.chown(folder, 0, self.manifest["spec"]["template"]["spec"]["securityContext"]["fsGroup"])
            folder.chmod(0o2775)
        return folder

    def _specs(self) -> list[dict[str, Any]]:
        spec = self.manifest["spec"]["template"]["spec"]
        return [*spec["initContainers"], *spec["containers"]]


def rendered(containers: Containers, **flags: str) -> dict[str, Any]:
    """The Job, from the command that a CI runs."""
    given = {"image": containers.image, "run_name": RUN, **flags}
    words = [word for flag, value in given.items() for word in (f"--{flag.replace('_', '-')}", value)]
    command = [sys.executable, "-m", "jobs", "render", MODEL, *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    manifest: dict[str, Any] = yaml.safe_load(done.stdout)
    return manifest


@pytest.fixture(scope="module")
def manifest(containers: Containers) -> dict[str, Any]:
    """The Job that reads and writes a volume."""
    return rendered(containers, output_root=OUTPUT, output_claim="output", source=f"{OUTPUT}/source")


def test_the_pod_is_restricted_as_these_containers_are(manifest: dict[str, Any]) -> None:
    spec = manifest["spec"]["template"]["spec"]
    assert (spec["securityContext"]["runAsUser"], spec["securityContext"]["runAsGroup"]) == (USER, USER)
    for container in (*spec["initContainers"], *spec["containers"]):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert container.get("command") is None, "the image's ENTRYPOINT is the converter"


def test_a_job_goes_on_after_its_pod_was_killed(
    manifest: dict[str, Any], containers: Containers, claim: Path, tmp_path: Path
) -> None:
    def output(variant: str) -> Path:
        return claim / MODEL / "to_maxtext" / variant / RUN

    first, second = (each.name.removeprefix("convert-") for each in containers_of(manifest)[:2])

    def kill() -> None:
        wait(lambda: sum(each.stat().st_size for each in output(second).rglob("*") if each.is_file()) > 20e6)
        containers.podman("kill", "--signal", "KILL", f"pod-convert-{second}")

    killed = list(Pod(containers, manifest, tmp_path / "1", claim).run(during=(f"convert-{second}", kill)))
    assert [(name, code) for name, code, _ in killed] == [
        (f"convert-{first}", 0),
        (f"convert-{second}", 128 + signal.SIGKILL),
    ], killed
    assert (output(first) / "0/items").is_dir()
    assert not (output(second) / "0").exists()
    finished = _files(output(first))

    names = [each.name for each in containers_of(manifest)]
    pod = Pod(containers, manifest, tmp_path / "2", claim)
    replaced = list(pod.run())
    assert [(name, code) for name, code, _ in replaced] == [(name, 0) for name in names], replaced
    # The first variant was not written again, nothing of the killed run is left of the second.
    assert _files(output(first)) == finished
    assert "skip" in pod.message(f"convert-{first}")
    assert {path.name for path in output(second).iterdir()} - {"check.json"} == {"0", "report.json"}
    assert json.loads(pod.message("check"))["result"] == "equal"

    # The Job checks one variant; both must be right.
    for variant in (first, second):
        path = f"{OUTPUT}/{MODEL}/to_maxtext/{variant}/{RUN}"
        done = containers.run("verify", path, "--source", f"{OUTPUT}/source", mounts={OUTPUT: claim})
        assert done.returncode == 0, done.stderr


def test_a_job_writes_to_a_bucket(containers: Containers, claim: Path, server: Server, tmp_path: Path) -> None:
    bucket = server.make_bucket("conversions")
    job = rendered(containers, bucket="conversions", source="/source")
    mounts = {"/source": claim / "source"}
    pod = Pod(containers, job, tmp_path / "1", claim, mounts, bucket.environment(), network="host")
    ran = list(pod.run())
    assert [(name, code) for name, code, _ in ran] == [(each.name, 0) for each in containers_of(job)], ran
    folders = {variant: f"{MODEL}/to_maxtext/{variant}/{RUN}" for variant in ("scanned", "unscanned")}
    wanted = {f"{folder}/{name}" for folder in folders.values() for name in ("report.json", "0/items/_METADATA")}
    assert bucket.objects() >= wanted | {f"{folders['unscanned']}/check.json"}
    assert json.loads(pod.message("check"))["result"] == "equal"
    # Another pod of the Job finds all of it done.
    again = Pod(containers, job, tmp_path / "2", claim, mounts, bucket.environment(), network="host")
    assert all(code == 0 for _, code, _ in again.run())
    for variant in folders:
        assert json.loads(again.message(f"convert-{variant}"))["result"] == "skipped"


def _files(folder: Path) -> dict[str, tuple[int, int]]:
    """Which files these are, and when they were written; but for the reports, which each run writes."""
    found = (path for path in folder.rglob("*") if path.is_file() and path.name not in ("report.json", "check.json"))
    return {str(path.relative_to(folder)): (path.stat().st_ino, path.stat().st_mtime_ns) for path in found}
