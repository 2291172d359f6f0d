"""Bad input to the command line: one line, exit code 2, nothing printed and nothing asked of any cluster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commands import IMAGE, RUN, Command

from jobs.settings import defaults

GOOD = {"--image": IMAGE, "--bucket": "acme", "--run-name": RUN}


def words(**changes: str) -> list[str]:
    """Good options with changes; "" leaves one out."""
    options = GOOD | {f"--{key.replace('_', '-')}": value for key, value in changes.items()}
    return [word for pair in options.items() if pair[1] for word in pair]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["qwen3-0.6", *words()], "did you mean qwen3-0.6b"),
        (["gibberish", *words()], "`python -m jobs list` shows the names"),
        (words(), "name models, or give --all or --nightly"),
        (["--all", "qwen3-4b", *words()], "one of the three"),
        (["qwen3-4b", *words(variants="scand")], "unknown variant 'scand'"),
        (["qwen3-4b", *words(variants="scanned_multimodal")], "qwen3-4b has no variant 'scanned_multimodal'"),
        (["qwen3-4b", *words(run_name="my run")], "--run-name 'my run' makes a bad label"),
        (["qwen3-4b", *words(image="")], "--image is missing"),
        (["qwen3-4b", *words(image="x/converter")], "has no tag"),
        (["qwen3-4b", *words(image="x/Converter:1")], "not an image's name"),
        (["qwen3-4b", *words(bucket="")], "nowhere to write to"),
        (["qwen3-4b", *words(bucket="UPPER")], "is not a bucket's name"),
        (["qwen3-4b", *words(output_root="gs://b")], "give one of them"),
        (["qwen3-4b", *words(bucket="", output_root="/data")], "--output-claim"),
        (["qwen3-4b", *words(bucket="", output_root="data")], "absolute path"),
        (["qwen3-4b", *words(bucket="", output_root="s3://b/x")], "absolute path"),
        (["qwen3-4b", *words(bucket="", output_root="/tmp", output_claim="c")], "give another path"),
        (["qwen3-4b", *words(output_claim="c")], "not for gs://"),
        (["qwen3-4b", *words(namespace="Team_A")], "--namespace 'Team_A' is not a DNS label"),
        (["qwen3-4b", *words(queue="a/b")], "--queue 'a/b' is not a DNS name"),
        (["qwen3-4b", *words(node_pool="A")], "--node-pool"),
        (["qwen3-4b", *words(machine_type="n2-highmem-128")], "n2-highmem-64"),
        (["qwen3-4b", *words(priority="urgent")], "--priority"),
        (["qwen3-4b", "qwen3-8b", *words(source="acme/x")], "name one"),
        (["qwen3-4b", *words(source="gs://acme/x", revision="v1")], "has none"),
        (["qwen3-4b", *words(stack_outputs="/nope")], "pulumi stack output --json"),
        (["qwen3-4b", "--imagine", "x", *words()], "unrecognized arguments"),
        (["llama3.1-405b", *words()], "diskSizeGb"),
    ],
)
def test_render(jobs: Command, given: list[str], told: str) -> None:
    ran = jobs("render", *given)
    assert ran.code == 2
    assert ran.out == ""
    assert told in ran.error


@pytest.mark.parametrize(
    "key", ["namespace", "queue", "serviceAccount", "podRequest", "nodeLabel", "taint", "secretName"]
)
def test_missing_outputs_are_named(jobs: Command, tmp_path: Path, key: str) -> None:
    outputs = {name: value for name, value in {**defaults(), "bucket": "acme"}.items() if name != key}
    (tmp_path / "o.json").write_text(json.dumps(outputs))
    ran = jobs("render", "qwen3-4b", *words(bucket="", stack_outputs=str(tmp_path / "o.json")))
    assert ran.code == 2
    assert key in ran.error
    assert "pulumi up" in ran.error


@pytest.mark.parametrize("text", ["", "[]", "{", "3"])
def test_outputs_that_are_none(jobs: Command, tmp_path: Path, text: str) -> None:
    (tmp_path / "o.json").write_text(text)
    ran = jobs("render", "qwen3-4b", *words(stack_outputs=str(tmp_path / "o.json")))
    assert ran.code == 2
    assert "pulumi stack output --json" in ran.error


def test_outputs_without_a_bucket(jobs: Command, tmp_path: Path) -> None:
    (tmp_path / "o.json").write_text(json.dumps(dict(defaults())))
    ran = jobs("render", "qwen3-4b", *words(bucket="", stack_outputs=str(tmp_path / "o.json")))
    assert ran.code == 2
    assert "--bucket" in ran.error


def test_outputs_in_other_units(jobs: Command, tmp_path: Path) -> None:
    outputs: dict[str, Any] = {**defaults(), "bucket": "acme"}
    outputs["podRequest"] = {**outputs["podRequest"], "memory": "460000M"}
    (tmp_path / "o.json").write_text(json.dumps(outputs))
    ran = jobs("render", "qwen3-4b", *words(bucket="", stack_outputs=str(tmp_path / "o.json")))
    assert ran.code == 2
    assert "podRequest.memory" in ran.error


def test_a_tag_is_a_warning_that_goes_to_stderr(jobs: Command) -> None:
    ran = jobs("render", "qwen3-4b", *words(image="x/converter:1.2"))
    assert ran.code == 0
    assert "jobs: warning:" in ran.err
    assert "warning" not in ran.out


def test_a_run_name_is_made_and_told(jobs: Command) -> None:
    ran = jobs("render", "qwen3-4b", *words(run_name=""))
    assert ran.code == 0
    run = ran.err.split("run name ")[1].split()[0]
    assert run.startswith("conv-2")
    assert run in ran.out


@pytest.mark.parametrize("command", ["wait", "logs", "cancel"])
def test_what_to_look_at_must_be_named(jobs: Command, command: str, tmp_path: Path) -> None:
    (tmp_path / "k").write_text(
        json.dumps(
            {
                "current-context": "c",
                "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
                "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:9"}}],
                "users": [{"name": "u", "user": {}}],
            }
        )
    )
    for given, told in (
        ((), "give --run-name"),
        (("qwen3-4b",), "give --run-name"),
        (("qwen3-4", "--run-name", "r"), "did you mean qwen3-4b"),
    ):
        ran = jobs(command, *given, "--kubeconfig", str(tmp_path / "k"))
        assert ran.code == 2
        assert told in ran.error


def test_no_command(jobs: Command) -> None:
    assert jobs().code == 2
    assert jobs("frobnicate").code == 2


def test_a_bug_is_called_one(jobs: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jobs.cli.catalogue", lambda: 1 / 0)
    ran = jobs("list")
    assert ran.code == 1
    assert "this is a bug" in ran.err


def test_in_a_cluster_the_service_account_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from kubernetes.config import incluster_config

    from jobs.cluster import connect

    (tmp_path / "token").write_text("t")
    (tmp_path / "ca.crt").write_text("c")
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(tmp_path / "ca.crt"))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    monkeypatch.setattr("kubernetes.client.ApiClient.__init__", lambda self, configuration: seen.append(configuration))
    seen: list[Any] = []
    connect("ns")
    assert seen[0].host == "https://10.0.0.1:443"
    assert seen[0].ssl_ca_cert == str(tmp_path / "ca.crt")
