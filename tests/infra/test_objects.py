"""Every Kubernetes object the program registers itself, against its schema, strictly."""

import copy
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
from harness import Registered, up
from schemas import CRDS, crd_folder, is_kueue, validate

INVALID = (jsonschema.ValidationError, kubernetes_validate.ValidationError)


def _all_objects() -> dict[str, Registered]:
    """The objects of a stack with everything on, by logical name."""
    stack = up(
        {
            "huggingFaceToken": "hf_x",
            "submitters": ["user:ann@acme.example", "group:ml@acme.example"],
            "rbacSecurityGroup": "gke-security-groups@acme.example",
            "githubRepository": "acme/models",
            "extraPools": [{"poolName": "small", "machineType": "n2-highmem-32", "localSsdCount": 4}],
            "extraQueues": [{"queueName": "nightly", "nodes": 3}],
            "cohort": "conversions",
        },
        secrets=("huggingFaceToken",),
    )
    return {each.name: each for each in stack.kubernetes_objects()}


OBJECTS = _all_objects()


@pytest.fixture(params=sorted(OBJECTS))
def manifest(request: pytest.FixtureRequest) -> dict[str, Any]:
    """One object."""
    found = copy.deepcopy(OBJECTS[request.param].manifest)
    if is_kueue(found) and crd_folder() is None:
        pytest.skip(f"no folder {CRDS} with Kueue's CRDs in $SHARED_DIR or in a `shared` beside the checkout")
    return found


def test_kinds() -> None:
    assert {each.manifest["kind"] for each in OBJECTS.values()} == {
        "Namespace",
        "ServiceAccount",
        "Secret",
        "NetworkPolicy",
        "Role",
        "RoleBinding",
        "ResourceFlavor",
        "ClusterQueue",
        "LocalQueue",
        "WorkloadPriorityClass",
    }


def test_object_is_valid(manifest: dict[str, Any]) -> None:
    validate(manifest)


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every object in a manifest whose fields are named by its kind, not by the user."""
    free = ("labels", "annotations", "matchLabels", "nodeLabels", "stringData")
    if isinstance(value, list):
        return [place for i, item in enumerate(value) for place in _places(item, (*path, i))]
    if not isinstance(value, dict) or (path[-1:] and path[-1] in free):
        return []
    return [path, *(place for key, item in value.items() for place in _places(item, (*path, key)))]


def test_a_wrong_field_anywhere_fails(manifest: dict[str, Any]) -> None:
    places = _places(manifest)
    assert () in places
    assert ("metadata",) in places
    for path in places:
        broken = copy.deepcopy(manifest)
        inner: Any = broken
        for step in path:
            inner = inner[step]
        inner["noSuchField"] = "x"
        with pytest.raises(INVALID):
            validate(broken)


def test_a_wrong_value_fails(manifest: dict[str, Any]) -> None:
    for key in set(manifest) - {"apiVersion", "kind"}:
        with pytest.raises(INVALID):
            validate({**manifest, key: 1.5})
