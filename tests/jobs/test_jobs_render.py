"""The rendered Job, against schemas, Kueue's and Kubernetes' rules, GKE's numbers and the converter's own parser."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jinja2
import kubernetes_validate
import pytest
import standin
import yaml
from commands import IMAGE, RUN, Command
from kubernetes import client

from converter import cli as converter_cli
from converter.request import make_request
from converter.words import parse_words
from jobs import render as rendering
from jobs.catalogue import Model, catalogue
from jobs.errors import RequestError
from jobs.render import HASH_ANNOTATION, Request, containers, render, spec_hash
from jobs.settings import Overrides, Settings, make

NAMES = list(catalogue())
KUEUE = "kueue.x-k8s.io"
# GKE: what is left of an n2-highmem-64 (64 CPU less 0.23; 512 GiB less the kernel's and GKE's share), and what its
# DaemonSets may take.
ALLOCATABLE = {"cpu": 63.77, "memory_gib": 486.0}
DAEMONSETS = {"cpu": 2.0, "memory_gib": 8.0}


def roomy() -> Settings:
    """A pool with eight local SSDs, which every model fits: 8 x 375 GB less what GKE keeps."""
    outputs = {
        "namespace": "shardpool-prod",
        "queue": "conversion",
        "serviceAccount": "converter",
        "bucket": "acme",
        "secretName": "hugging-face-token",
        "secretKey": "token",
        "machineType": "n2-highmem-64",
        "spot": False,
        "nodeLabel": {"key": "conversion-pool", "value": "shardpool-prod-conversion"},
        "taint": {"key": "conversion-pool", "value": "shardpool-prod-conversion", "effect": "NoSchedule"},
        "podRequest": {"cpu": "60", "memory": "460Gi", "ephemeralStorage": "2280Gi"},
    }
    return make(outputs, Overrides())


def of(name: str, settings: Settings | None = None, **options: Any) -> dict[str, Any]:
    """The Job of a catalogue model."""
    request = Request(catalogue()[name], RUN, IMAGE, allow_unsupported=True, **options)
    return render(request, settings or roomy())


def pod_of(job: dict[str, Any]) -> dict[str, Any]:
    pod: dict[str, Any] = job["spec"]["template"]["spec"]
    return pod


@pytest.mark.parametrize("name", NAMES)
def test_every_model_renders_strictly_valid(name: str) -> None:
    kubernetes_validate.validate(of(name), "1.35", strict=True)


def test_the_validation_sees_a_misspelt_field() -> None:
    job = of("qwen3-0.6b")
    pod_of(job)["nodeSelecter"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, "1.35", strict=True)


@pytest.mark.parametrize("name", NAMES)
def test_the_clients_own_model_of_a_job_loses_nothing(name: str) -> None:
    job = of(name)
    api: Any = client.ApiClient()

    class Response:
        data = json.dumps(job)

    try:
        typed = api.deserialize(Response(), "V1Job")  # the client before version 37
    except TypeError:
        typed = api.deserialize(json.dumps(job), "V1Job", "application/json")
    assert api.sanitize_for_serialization(typed) == job


@pytest.mark.parametrize("name", NAMES)
def test_kueues_webhook_would_take_it(name: str) -> None:
    """kueue/pkg/controller/jobframework/validation.go, ValidateJobOnCreate and ...OnUpdate."""
    job = of(name)
    labels = job["metadata"]["labels"]
    subdomain = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
    assert re.fullmatch(subdomain, labels[f"{KUEUE}/queue-name"])
    assert labels[f"{KUEUE}/priority-class"] in ("very-high", "high", "medium", "low")
    # Suspended, or its queue could not be changed and it would run past the queue.
    assert job["spec"]["suspend"] is True
    kueues = {key for thing in (job, job["spec"]["template"]) for key in _keys(thing["metadata"]) if KUEUE in key}
    assert kueues == {f"{KUEUE}/queue-name", f"{KUEUE}/priority-class"}, "nothing that other rules are about"
    assert job["spec"]["parallelism"] == job["spec"]["completions"] == 1


def _keys(metadata: dict[str, Any]) -> list[str]:
    return [*metadata.get("labels", {}), *metadata.get("annotations", {})]


@pytest.mark.parametrize("name", NAMES)
def test_one_pod_fits_a_node_and_two_do_not(name: str) -> None:
    pod = pod_of(of(name))
    for container in (*pod["initContainers"], *pod["containers"]):
        assert container["resources"]["requests"] == container["resources"]["limits"]
    wanted = standin.requests(pod)
    size = {"cpu": wanted["cpu"], "memory_gib": wanted["memory"] / 2**30}
    for resource, left in ALLOCATABLE.items():
        assert left / 2 < size[resource] <= left - DAEMONSETS[resource]
    assert size == {"cpu": 60, "memory_gib": 460}


@pytest.mark.parametrize("name", ["llama3.1-70b", "qwen3-0.6b", "gemma3-4b"])
def test_the_queue_of_the_stack_covers_every_resource(name: str, stack: dict[str, Any]) -> None:
    settings = make(stack["outputs"], Overrides())
    queue = stack["objects"]["clusterqueue-conversion"]["spec"]["resourceGroups"]
    quota = {each["name"]: each["nominalQuota"] for group in queue for each in group["flavors"][0]["resources"]}
    wanted = standin.requests(pod_of(of(name, settings)))
    assert set(wanted) == set(quota)
    assert all(standin.quantity(quota[resource]) == 10 * amount for resource, amount in wanted.items())


def test_the_stacks_own_names_are_the_jobs(stack: dict[str, Any]) -> None:
    job = of("qwen3-0.6b", make(stack["outputs"], Overrides()))
    objects = stack["objects"]
    assert job["metadata"]["namespace"] == objects["namespace"]["metadata"]["name"]
    assert job["metadata"]["labels"][f"{KUEUE}/queue-name"] == objects["localqueue-conversion"]["metadata"]["name"]
    pod = pod_of(job)
    assert pod["serviceAccountName"] == objects["converter-account"]["metadata"]["name"]
    flavor = objects["flavor-conversion"]["spec"]
    assert pod["nodeSelector"] == flavor["nodeLabels"]
    assert pod["tolerations"] == flavor["tolerations"]
    reference = next(each for each in pod["containers"][0]["env"] if each["name"] == "HF_TOKEN")["valueFrom"]
    secret = objects["hugging-face-token"]
    assert reference["secretKeyRef"]["name"] == secret["metadata"]["name"]
    assert reference["secretKeyRef"]["key"] in secret["stringData"]


@pytest.mark.parametrize("name", NAMES)
def test_the_pod_meets_the_restricted_standard(name: str) -> None:
    """Kubernetes' Pod Security Standards, "Restricted", and what this project asks beyond it."""
    pod = pod_of(of(name))
    assert {"hostNetwork", "hostPID", "hostIPC"}.isdisjoint(pod)
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == pod["securityContext"]["runAsGroup"] == 65532
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    for container in (*pod["initContainers"], *pod["containers"]):
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert context["readOnlyRootFilesystem"] is True
    allowed = {"emptyDir", "persistentVolumeClaim"}
    assert all(len(allowed & set(volume)) == 1 and len(volume) == 2 for volume in pod["volumes"])


def test_what_must_be_writable_is_a_volume() -> None:
    job = of("qwen3-0.6b")
    volumes = {volume["name"] for volume in pod_of(job)["volumes"]}
    for container in containers(job):
        for variable in ("HOME", "HF_HOME", "TMPDIR"):
            path = container.env[variable]
            assert any(path == mount or path.startswith(f"{mount}/") for mount in container.mounts), variable
        assert set(container.mounts.values()) <= volumes
    assert len({container.env["HF_HOME"] for container in containers(job)}) == 1, "they share one download"


def test_the_job_lives_and_ends_as_it_should() -> None:
    job = of("llama3.1-70b")
    spec, pod = job["spec"], pod_of(job)
    assert spec["activeDeadlineSeconds"] == 6 * 3600
    assert spec["backoffLimit"] == 3
    assert spec["ttlSecondsAfterFinished"] == 3 * 86400
    # Kubernetes takes no other with a podFailurePolicy.
    assert spec["podReplacementPolicy"] == "Failed"
    assert pod["restartPolicy"] == "Never"
    assert pod["terminationGracePeriodSeconds"] == 60
    annotations = spec["template"]["metadata"]["annotations"]
    assert annotations["cluster-autoscaler.kubernetes.io/safe-to-evict"] == "false"


@pytest.mark.parametrize("container", ["convert-unscanned", "convert-scanned", "check"])
@pytest.mark.parametrize(
    ("code", "disrupted", "action"),
    [
        (1, False, "FailJob"),
        (2, False, "FailJob"),
        (4, False, "FailJob"),
        (3, False, "Count"),
        (137, False, "Count"),
        (143, False, "Count"),
        (143, True, "Ignore"),
        (2, True, "Ignore"),
    ],
)
def test_exit_codes_decide_what_becomes_of_the_job(container: str, code: int, disrupted: bool, action: str) -> None:
    job = of("qwen3-0.6b")
    status: dict[str, Any] = {
        "phase": "Failed",
        "conditions": [{"type": "DisruptionTarget", "status": "True"}] if disrupted else [],
        "initContainerStatuses": [],
        "containerStatuses": [],
    }
    kind = "containerStatuses" if container == "check" else "initContainerStatuses"
    status[kind].append({"name": container, "state": {"terminated": {"exitCode": code}}})
    assert standin.failure_action(job, {"status": status})[0] == action


def test_variants_are_converted_in_order_and_then_checked() -> None:
    names = [container.name for container in containers(of("gemma3-4b"))]
    assert names == ["convert-unscanned", "convert-scanned", "convert-scanned-multimodal", "check"]
    names = [container.name for container in containers(of("gemma3-4b", variants=("scanned_multimodal", "unscanned")))]
    assert names == ["convert-unscanned", "convert-scanned-multimodal", "check"]


def test_output_lies_where_the_training_dags_look() -> None:
    job = of("llama3.1-70b")
    found = rendering.outputs(job)
    assert found == {
        "unscanned": f"gs://acme/llama3.1-70b/to_maxtext/unscanned/{RUN}",
        "scanned": f"gs://acme/llama3.1-70b/to_maxtext/scanned/{RUN}",
    }
    assert f"base_output_directory={found['scanned']}" in containers(job)[1].args
    assert containers(job)[2].args[:2] == ("verify", found["unscanned"])
    multimodal = of("qwen3-vl-2b")
    assert rendering.outputs(multimodal) == {
        "unscanned_multimodal": f"gs://acme/qwen3-vl-2b/to_maxtext/unscanned_multimodal/{RUN}"
    }


def test_without_the_checked_variant_another_that_is_written_is_checked() -> None:
    job = of("llama3.1-70b", variants=("scanned",))
    assert containers(job)[-1].args[1] == f"gs://acme/llama3.1-70b/to_maxtext/scanned/{RUN}"


@pytest.mark.parametrize("name", NAMES)
def test_the_converter_takes_its_words(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = catalogue()[name]
    *conversions, check = containers(of(name))
    for container, variant in zip(conversions, model.variants, strict=True):
        assert container.command == ()
        command, *words = container.args
        assert command == "to-maxtext"
        parsed = parse_words(words)
        assert not parsed.others
        request = make_request(parsed)
        assert (request.notes, request.step.as_posix()) == ((), f"{parsed.values['base_output_directory']}/0")
        values = parsed.values
        assert values["model_name"] == name
        assert values["run_name"] == RUN
        assert values["scan_layers"] is variant.startswith("scanned")
        assert values["use_multimodal"] is variant.endswith("multimodal")
        assert (values["checkpoint_storage_use_zarr3"], values["checkpoint_storage_use_ocdbt"]) == (
            (False, False) if model.nightly else (True, True)
        )
        assert values["hf_model_path"] == model.hub
        assert values["if_exists"] == "skip"
        assert values["threads"] == 60
        assert values["report"] == f"{values['base_output_directory']}/report.json"
        assert values["termination_message"] == "/dev/termination-log"
        assert values["log_format"] == "json"
        assert {"hardware=cpu", "skip_jax_distributed_system=True"} <= set(words)
    found = []

    def run_verification(_: object, parse: Callable[[], Any]) -> int:
        found.append(parse())
        return 0

    monkeypatch.setattr("converter.run.run_verification", run_verification)
    assert converter_cli.main(list(check.args)) == 0
    ((asked, message),) = found
    assert (asked.source, asked.model_name, asked.threads) == (model.hub, name, 60)
    assert str(asked.report) == f"{asked.path}/check.json"
    assert message == "/dev/termination-log"
    assert "--log_format=json" in check.args


def test_a_fine_tune_is_converted_under_its_base_models_name() -> None:
    job = of("llama3.1-8b", source="acme/Llama-tuned", revision="v2")
    conversion, *_, check = containers(job)
    assert "--hf_model_path=acme/Llama-tuned" in conversion.args
    assert "--revision=v2" in conversion.args
    assert "model_name=llama3.1-8b" in conversion.args
    assert {"--source=acme/Llama-tuned", "--revision=v2"} <= set(check.args)


def test_a_model_in_a_bucket_is_read_into_the_volume_of_the_cache() -> None:
    """Once for all containers. Ranges would go to TMPDIR, whose volume a stack of layers does not fit."""
    job = of("llama3.1-70b", source="gs://acme/llama-tuned")
    *conversions, check = containers(job)
    words = [parse_words(list(container.args[1:])).values for container in conversions]
    assert {each["hf_model_path"] for each in words} == {"gs://acme/llama-tuned"}
    (cache,) = {each["cache_dir"] for each in words}
    assert {"--source=gs://acme/llama-tuned", f"--cache_dir={cache}"} <= set(check.args)
    assert all(container.mounts["/cache"] == "cache" for container in containers(job))
    assert cache.startswith("/cache/")


def test_the_cache_is_memory_while_all_fits_and_the_budget_what_is_left() -> None:
    def cache(job: dict[str, Any]) -> dict[str, Any]:
        volume: dict[str, Any] = next(each for each in pod_of(job)["volumes"] if each["name"] == "cache")["emptyDir"]
        return volume

    # 70.55e9 parameters in two bytes are 131.4 GiB.
    small = cache(of("llama3.1-70b"))
    assert small["medium"] == "Memory"
    assert 131.4 < standin.quantity(small["sizeLimit"]) / 2**30 < 142
    # 405.85e9 parameters: 755.9 GiB, more than the pod's 460.
    large = cache(of("llama3.1-405b"))
    assert "medium" not in large
    assert 755.9 < standin.quantity(large["sizeLimit"]) / 2**30 < 800


def test_a_float32_check_of_a_large_model_sends_the_cache_to_disk(settings: Settings) -> None:
    model = catalogue()["llama3.1-70b"]
    # Two models of 70.55e9 parameters in float32: 525 GiB, more than the pod has, let alone beside the cache.
    wide = replace(model, check=replace(model.check, dtype="float32"))
    pod = pod_of(render(Request(wide, RUN, IMAGE), settings))
    assert "medium" not in next(each for each in pod["volumes"] if each["name"] == "cache")["emptyDir"]


def test_memory_adds_up() -> None:
    for name in NAMES:
        job = of(name)
        memory = standin.requests(pod_of(job))["memory"] / 2**30
        held = sum(
            standin.quantity(each["emptyDir"]["sizeLimit"]) / 2**30
            for each in pod_of(job)["volumes"]
            if each["emptyDir"].get("medium") == "Memory"
        )
        budget = parse_words(containers(job)[0].args[1:]).values["memory_budget"] / 2**30
        # The converter's peak: the budget, as much again compressed, what is being committed, and half a GiB.
        assert held + 2.2 * budget + 0.5 <= memory, name
        assert budget >= 4, "two of the largest chunks"


def test_a_model_larger_than_the_pools_disk_is_refused(settings: Settings) -> None:
    with pytest.raises(RequestError) as refused:
        of("llama3.1-405b", settings)
    assert "690 GiB" in str(refused.value)
    assert "diskSizeGb" in str(refused.value)


@pytest.mark.parametrize("machine", ["n2-highmem-32", "n2-highmem-80", "c3-highmem-176", "n2d-highmem-64"])
def test_other_machines(machine: str) -> None:
    job = of("qwen3-8b", make(None, Overrides(bucket="acme", machine_type=machine)))
    cores = int(machine.rpartition("-")[2])
    wanted = standin.requests(pod_of(job))
    assert cores / 2 < wanted["cpu"] < cores
    assert f"--threads={wanted['cpu']}" in containers(job)[0].args


def test_a_path_for_the_output_is_the_claims_mount() -> None:
    settings = make(None, Overrides(output_root="/data/out/", output_claim="results"))
    job = of("qwen3-0.6b", settings)
    kubernetes_validate.validate(job, "1.35", strict=True)
    assert {"name": "output", "persistentVolumeClaim": {"claimName": "results"}} in pod_of(job)["volumes"]
    for container in containers(job):
        assert container.mounts["/data/out"] == "output"
    assert f"base_output_directory=/data/out/qwen3-0.6b/to_maxtext/unscanned/{RUN}" in containers(job)[0].args


def test_the_token_comes_from_the_secret_and_stands_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_verysecret")
    job = of("llama3.1-8b")
    assert "hf_verysecret" not in json.dumps(job)
    for container in containers(job):
        assert container.secret_env == {"HF_TOKEN": ("hugging-face-token", "token")}
    without = of("llama3.1-8b", make({**_outputs(), "secretName": ""}, Overrides()))
    assert all(not container.secret_env for container in containers(without))


def _outputs() -> dict[str, Any]:
    from jobs.settings import defaults

    return {**defaults(), "bucket": "acme"}


def test_the_same_request_gives_the_same_job_and_any_other_another() -> None:
    job = of("llama3.1-8b")
    assert job == of("llama3.1-8b")
    stored = job["metadata"]["annotations"][HASH_ANNOTATION]
    assert stored == spec_hash(job)
    others = [
        of("llama3.1-8b", variants=("scanned",)),
        of("llama3.1-8b", priority="high"),
        of("llama3.1-8b", revision="main"),
        of("llama3.1-8b", make(None, Overrides(bucket="other"))),
    ]
    hashes = {each["metadata"]["annotations"][HASH_ANNOTATION] for each in others}
    assert len(hashes | {stored}) == 5


def test_the_run_keeps_its_case_in_paths_and_labels_not_in_the_name() -> None:
    job = of("llama3.1-70b")
    assert job["metadata"]["name"] == "llama3-1-70b-conv-20260813t123008"
    assert job["metadata"]["labels"]["conversion-run"] == "conv-20260813T123008"
    assert job["spec"]["template"]["metadata"]["labels"]["conversion-model"] == "llama3.1-70b"


@pytest.mark.parametrize("text", ['he said "{}"', "a: b # c", "{{ 1 + 1 }}", "'", "\\", "<&>", "*x", "!!python/none"])
def test_no_text_can_change_the_jobs_shape(text: str) -> None:
    plain, odd = of("qwen3-0.6b", source="org/name"), of("qwen3-0.6b", source=text)
    assert f"--hf_model_path={text}" in containers(odd)[0].args
    assert yaml.safe_load(json.dumps(odd).replace(json.dumps(text)[1:-1], "org/name"))["spec"] == plain["spec"]


def test_undefined_variables_are_errors() -> None:
    with pytest.raises(jinja2.UndefinedError):
        rendering._template().render(name="x")


def test_unsupported_models_are_refused_in_one_line(jobs: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    name, found = "qwen3-4b", catalogue()
    monkeypatch.setattr("jobs.cli.catalogue", lambda: {**found, name: replace(found[name], supported=False)})
    words = ("render", name, "--image", IMAGE, "--bucket", "acme", "--run-name", RUN)
    ran = jobs(*words)
    assert ran.code == 2
    assert ran.out == ""
    assert name in ran.error
    assert "--allow-unsupported" in ran.error
    assert jobs(*words, "--allow-unsupported").code == 0


def test_render_prints_what_kubectl_takes(jobs: Command) -> None:
    ran = jobs("render", "llama3.1-8b", "qwen3-4b", "--image", IMAGE, "--bucket", "acme", "--run-name", RUN)
    assert ran.code == 0
    assert ran.err == ""
    documents = list(yaml.safe_load_all(ran.out))
    assert [each["metadata"]["name"] for each in documents] == [
        "llama3-1-8b-conv-20260813t123008",
        "qwen3-4b-conv-20260813t123008",
    ]
    for each in documents:
        kubernetes_validate.validate(each, "1.35", strict=True)
        assert each["metadata"]["annotations"][HASH_ANNOTATION] == spec_hash(each)


def test_all_is_all_that_can_be(jobs: Command) -> None:
    ran = jobs("render", "--all", "--image", IMAGE, "--bucket", "acme", "--run-name", RUN)
    assert ran.code == 0
    rendered = {each["metadata"]["labels"]["conversion-model"] for each in yaml.safe_load_all(ran.out)}
    left_out = {line.split("left out: ")[1].split()[0].rstrip(":") for line in ran.err.splitlines()}
    assert rendered | left_out == set(catalogue())
    assert left_out == {model.name for model in catalogue().values() if _is_huge(model)}


def _is_huge(model: Model) -> bool:
    """Whether its download exceeds the 690 GiB of disk of a pod less 9 GiB for all else, with 5 % and 1 GiB more."""
    return model.source_bytes * 1.05 / 2**30 > 680


def test_stack_outputs_are_read_from_a_file(jobs: Command, stack: dict[str, Any], tmp_path: Any) -> None:
    ran = jobs(
        "render", "qwen3-4b", "--image", IMAGE, "--run-name", RUN, "--stack-outputs", str(tmp_path / "outputs.json")
    )
    assert ran.code == 0
    assert f"gs://{stack['outputs']['bucket']}/qwen3-4b/to_maxtext/scanned/{RUN}" in ran.out


def test_defaults_are_what_the_program_makes(stack: dict[str, Any]) -> None:
    from jobs.settings import defaults

    assert {**stack["outputs"], **defaults()} == stack["outputs"]


def test_flags_win_over_outputs(stack: dict[str, Any]) -> None:
    settings = make(
        stack["outputs"],
        Overrides(
            bucket="b-1", namespace="n", queue="q", service_account="s", secret="x", secret_key="k", node_pool="p"
        ),
    )
    assert settings.output_root == "gs://b-1"
    assert (settings.namespace, settings.queue, settings.service_account) == ("n", "q", "s")
    assert (settings.secret, settings.secret_key) == ("x", "k")
    assert settings.node_label == {"conversion-pool": "p"}
    assert settings.toleration["value"] == "p"


def test_another_queue_brings_its_own_pool() -> None:
    outputs = _outputs()
    small = {
        "nodes": 4,
        "machineType": "n2-highmem-32",
        "nodeLabel": {"key": "conversion-pool", "value": "small"},
        "taint": {"key": "conversion-pool", "value": "small", "effect": "NoSchedule"},
        "podRequest": {"cpu": "29", "memory": "225Gi", "ephemeralStorage": "690Gi"},
    }
    settings = make({**outputs, "queues": {"small": small}}, Overrides(queue="small"))
    assert (settings.cpu, settings.memory_gib, settings.node_label) == (29, 225, {"conversion-pool": "small"})
