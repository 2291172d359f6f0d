"""A model and a run -> the Job.

The template is the only place where the Job is written down; the CLI, the Airflow DAG and the tests all render it here.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
import yaml

from jobs.catalogue import FOLDER, Model, pick_variants
from jobs.errors import RequestError
from jobs.naming import check_image, check_run_name, job_name, output_directory
from jobs.settings import Settings
from jobs.sizes import SCRATCH_GIB, sizes

Manifest = dict[str, Any]

MANAGED_BY = "conversion-jobs"
MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"
MODEL_LABEL = "conversion-model"
RUN_LABEL = "conversion-run"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
OUTPUT_ANNOTATION = "conversion-output"
HASH_ANNOTATION = "conversion-spec-hash"

FATAL_EXIT_CODES = (1, 2, 4)
"""Exit codes after which another try cannot help: a bug, a wrong request, a difference."""

USER = 65532
HOME, TMP, CACHE = "/home/converter", "/tmp", "/cache"

_BACKOFF_LIMIT = 3
_TTL_SECONDS = 3 * 24 * 3600
# Enough to remove a half-written checkpoint from a bucket.
_GRACE_SECONDS = 60
# What `status` reads, and log entries as Cloud Logging takes them.
_TELLING = ("--termination_message=/dev/termination-log", "--log_format=json")


@dataclass(frozen=True)
class Request:
    """One model's conversion in one run.

    Attributes:
      image: of the converter.
      variants: those to write; empty means all the catalogue has.
      priority: WorkloadPriorityClass; "" means the catalogue's.
      source: repository or folder instead of the catalogue's, as a fine-tune's; "" means the catalogue's.
      revision: of the source; "" means the catalogue's, or the default branch of another source.
      allow_unsupported: render a model that this version of the converter does not support.
    """

    model: Model
    run: str
    image: str
    variants: tuple[str, ...] = ()
    priority: str = ""
    source: str = ""
    revision: str = ""
    allow_unsupported: bool = False


@dataclass(frozen=True)
class Container:
    """One container of a Job, as whatever runs it needs it.

    Attributes:
      command: instead of the image's ENTRYPOINT; empty means the ENTRYPOINT.
      env: literal values.
      secret_env: name -> (Secret, key).
      mounts: path in the container -> volume's name.
    """

    name: str
    image: str
    command: tuple[str, ...]
    args: tuple[str, ...]
    env: Mapping[str, str]
    secret_env: Mapping[str, tuple[str, str]]
    mounts: Mapping[str, str]


def render(request: Request, settings: Settings) -> Manifest:
    """The Job.

    Raises:
      RequestError: the model, a variant, the run's name or the image cannot be, or the pool is too small.
    """
    model = request.model
    if not model.supported and not request.allow_unsupported:
        raise RequestError(
            f"{model.name} is not supported by this version of the converter yet; "
            "--allow-unsupported renders its Job all the same"
        )
    if request.source.startswith("gs://") and request.revision:
        raise RequestError(f"--revision {request.revision}: {request.source} has none; drop it")
    check_run_name(request.run)
    check_image(request.image)
    variants = pick_variants(model, request.variants)
    sized = sizes(model, settings)
    outputs = {name: output_directory(settings.output_root, model.name, name, request.run) for name in variants}
    # Without the variant that the catalogue has checked, the first that is written is.
    checked = model.check.variant if model.check.variant in variants else variants[0]
    text = _template().render(
        model=model,
        run=request.run,
        name=job_name(model.name, request.run),
        image=request.image,
        settings=settings,
        sizes=sized,
        priority=request.priority or model.priority,
        outputs=outputs,
        variants=[
            {"name": name, "arguments": _conversion(request, settings, name, outputs[name], sized.budget)}
            for name in variants
        ],
        check_arguments=_check(request, settings, outputs[checked]),
        paths={"home": HOME, "tmp": TMP, "cache": CACHE},
        managed_by=MANAGED_BY,
        user=USER,
        scratch_gib=SCRATCH_GIB,
        fatal_exit_codes=list(FATAL_EXIT_CODES),
        backoff_limit=_BACKOFF_LIMIT,
        deadline_seconds=round(model.time_limit_hours * 3600),
        ttl_seconds=_TTL_SECONDS,
        grace_seconds=_GRACE_SECONDS,
    )
    manifest: Manifest = yaml.safe_load(text)
    manifest["metadata"]["annotations"][HASH_ANNOTATION] = spec_hash(manifest)
    return manifest


def spec_hash(manifest: Mapping[str, Any]) -> str:
    """A digest of everything the manifest says, but for the digest itself."""
    metadata = manifest["metadata"]
    annotations = {key: value for key, value in metadata["annotations"].items() if key != HASH_ANNOTATION}
    content = {**manifest, "metadata": {**metadata, "annotations": annotations}}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def to_yaml(manifests: Sequence[Manifest]) -> str:
    """Manifests as a stream of YAML documents, for `kubectl create -f -`."""
    return yaml.safe_dump_all(manifests, sort_keys=False, explicit_start=True, width=120)


def outputs(manifest: Mapping[str, Any]) -> dict[str, str]:
    """Variant -> the `base_output_directory` that a Job writes it to; empty for a Job that does not say."""
    annotations = manifest["metadata"].get("annotations") or {}
    found: dict[str, str] = json.loads(annotations.get(OUTPUT_ANNOTATION, "{}"))
    return found


def report_path(output: str) -> str:
    """Where the converter writes the report of a conversion to `output`."""
    return f"{output}/report.json"


def check_report_path(output: str) -> str:
    """Where the report of the check of `output` goes."""
    return f"{output}/check.json"


def containers(manifest: Mapping[str, Any]) -> list[Container]:
    """A Job's containers in the order they run: first the init containers."""
    pod = manifest["spec"]["template"]["spec"]
    return [_container(each) for each in (*pod.get("initContainers", ()), *pod["containers"])]


def _container(spec: Mapping[str, Any]) -> Container:
    env = spec.get("env", ())
    references = {each["name"]: each["valueFrom"]["secretKeyRef"] for each in env if "valueFrom" in each}
    return Container(
        name=spec["name"],
        image=spec["image"],
        command=tuple(spec.get("command", ())),
        args=tuple(spec.get("args", ())),
        env={each["name"]: each["value"] for each in env if "value" in each},
        secret_env={name: (each["name"], each["key"]) for name, each in references.items()},
        mounts={each["mountPath"]: each["name"] for each in spec.get("volumeMounts", ())},
    )


def _source(request: Request, flag: str) -> list[str]:
    """The converter's words for the source, which it takes by this flag."""
    model = request.model
    revision = request.revision or ("" if request.source else model.revision)
    source = request.source or model.hub
    # Variants and check read a bucket's model once, too. By ranges they would keep stacks of layers at TMPDIR, whose
    # volume is small.
    cache = [f"--cache_dir={CACHE}/bucket"] if source.startswith("gs://") else []
    return [f"--{flag}={source}", *([f"--revision={revision}"] if revision else []), *cache]


def _conversion(request: Request, settings: Settings, variant: str, output: str, budget: int) -> list[str]:
    """The converter's words for one variant."""
    model = request.model
    return [
        "to-maxtext",
        f"model_name={model.name}",
        f"base_output_directory={output}",
        f"run_name={request.run}",
        f"scan_layers={variant.startswith('scanned')}",
        f"use_multimodal={variant.endswith('_multimodal')}",
        f"checkpoint_storage_use_ocdbt={model.storage.ocdbt}",
        f"checkpoint_storage_use_zarr3={model.storage.zarr3}",
        "hardware=cpu",
        "skip_jax_distributed_system=True",
        *_source(request, "hf_model_path"),
        f"--memory_budget={budget}GiB",
        # The node's cores are all visible in the pod, those it does not get too.
        f"--threads={settings.cpu}",
        "--if_exists=skip",
        f"--report={report_path(output)}",
        *_TELLING,
    ]


def _check(request: Request, settings: Settings, output: str) -> list[str]:
    """The converter's words for the check of one variant."""
    return [
        "verify",
        output,
        *_source(request, "source"),
        f"--model_name={request.model.name}",
        f"--threads={settings.cpu}",
        f"--report={check_report_path(output)}",
        *_TELLING,
    ]


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER / "templates"),
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # YAML: every text goes through tojson
        keep_trailing_newline=True,
    )
    return environment.get_template("job.yaml.j2")
