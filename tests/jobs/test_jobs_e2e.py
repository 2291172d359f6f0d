"""The tests for a real cluster, run against the stand-in: that they work, and leave nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import stack
import standin

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_they_pass_and_clean_up(tmp_path: Path) -> None:
    stack.dump()  # skips where there is no Pulumi
    with standin.serving(tmp_path, {"objects": {}}) as (server, kubeconfig):
        server.namespaces.add("kube-node-lease")
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "tests/e2e", "-m", "e2e", "-p", "no:cacheprovider"],
            cwd=ROOT,
            env={**os.environ, "KUBECONFIG": str(kubeconfig), "SHARDPOOL_INFRA_PYTHON": str(stack.pulumi_python())},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stdout
        assert "skipped" not in done.stdout
        assert server.namespaces == {"kube-node-lease"}
        for kind in (standin.JOBS, standin.PODS):
            assert server.all(kind) == []
        for kind in ("clusterqueues", "resourceflavors", "localqueues", "workloadpriorityclasses"):
            assert server.all(f"kueue.x-k8s.io/v1beta2/{kind}") == []
        assert not [node for node in server.all(standin.NODES) if node["metadata"]["name"].startswith("e2e-")]
