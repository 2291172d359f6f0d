"""Prints what the Pulumi program makes of a small stack: its Kubernetes objects and its outputs, as JSON.

Run by Pulumi's Python, not by that of the tests: `python dump_stack.py STACK`.
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "infra"), str(ROOT)]


def main(stack_name: str) -> None:
    """Print the stack."""
    from harness import up

    stack = up(
        {"huggingFaceToken": "hf_x", "githubRepository": "acme/models", "queueName": "conversion"},
        secrets=("huggingFaceToken",),
        stack_name=stack_name,
    )
    objects = {each.name: each.manifest for each in stack.kubernetes_objects()}
    json.dump({"objects": objects, "outputs": stack.outputs}, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1])
