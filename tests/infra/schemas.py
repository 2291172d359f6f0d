"""Strict validation of Kubernetes objects: core kinds by kubernetes-validate, Kueue's by its own CRDs."""

import functools
import os
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

KUBERNETES_VERSION = "1.35"
CRDS = "kueue-crds"

_ROOT = Path(__file__).resolve().parents[2]


def crd_folder() -> Path | None:
    """The folder with Kueue's CRDs: in $SHARED_DIR, or in a `shared` beside the checkout or further up."""
    shared = os.environ.get("SHARED_DIR")
    candidates = [Path(shared)] if shared else [parent / "shared" for parent in _ROOT.parents]
    return next((each / CRDS for each in candidates if (each / CRDS).is_dir()), None)


def is_kueue(manifest: dict[str, Any]) -> bool:
    """Whether the object is of one of Kueue's kinds."""
    return str(manifest["apiVersion"]).startswith("kueue.x-k8s.io/")


def validate(manifest: dict[str, Any]) -> None:
    """Raises if the object has a field its kind does not have, lacks a needed one, or has a wrong value."""
    if is_kueue(manifest):
        jsonschema.validate(
            manifest, _crd_schema(manifest["kind"], manifest["apiVersion"]), jsonschema.Draft202012Validator
        )
    else:
        kubernetes_validate.validate(manifest, KUBERNETES_VERSION, strict=True)


@functools.cache
def _crd_schema(kind: str, api_version: str) -> dict[str, Any]:
    folder = crd_folder()
    assert folder is not None
    for path in sorted(folder.glob("*.yaml")):
        crd = yaml.safe_load(path.read_text())
        if crd["spec"]["names"]["kind"] == kind:
            (version,) = (v for v in crd["spec"]["versions"] if f"{crd['spec']['group']}/{v['name']}" == api_version)
            assert version["served"]
            assert "deprecationWarning" not in version
            schema = _strict(version["schema"]["openAPIV3Schema"])
            schema["properties"]["metadata"] = _METADATA[crd["spec"]["scope"]]
            schema["required"] = sorted({*schema.get("required", []), "apiVersion", "kind", "metadata"})
            return schema
    raise AssertionError(f"no CRD of kind {kind} in {folder}")


def _metadata(*needed: str) -> dict[str, Any]:
    texts = {"type": "object", "additionalProperties": {"type": "string"}}
    return {
        "type": "object",
        "properties": {
            **{name: {"type": "string"} for name in needed},
            "labels": texts,
            "annotations": texts,
        },
        "required": list(needed),
        "additionalProperties": False,
    }


_METADATA = {"Cluster": _metadata("name"), "Namespaced": _metadata("name", "namespace")}


def _strict(schema: Any) -> Any:
    """An OpenAPI schema as JSON Schema that refuses fields it does not list."""
    if isinstance(schema, list):
        return [_strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    strict = {key: _strict(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
        strict.setdefault("additionalProperties", False)
    if schema.get("x-kubernetes-int-or-string"):
        strict.pop("type", None)
    return strict
