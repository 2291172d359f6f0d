"""The vision tower of Qwen3-VL, Qwen3-Omni and Qwen3.5. MaxText never scans its blocks.

Query, key and value are one matrix in the repositories; the patch embedding is a convolution in three dimensions.
"""

from typing import Any

from converter import sizes
from converter.rules import Form, Rule, Stack, Tower, affine, rules

_DEEPSTACK = "MaxText feeds the vision tower's intermediate layers into single decoder layers, which it does not scan"
_PREFIX = "vision_config."


def vision_defaults(prefix: str = _PREFIX) -> dict[str, Any]:
    """Derived sizes; `prefix` is where in config.json the vision tower's keys are."""
    return {f"{prefix}deepstack_layers": lambda c: len(c.get(f"{prefix}deepstack_visual_indexes") or ())}


def vision_dims(prefix: str = _PREFIX) -> dict[str, str]:
    """The dimensions of text model and vision tower."""
    keys = {
        "ve": "hidden_size", "vf": "intermediate_size", "vh": "num_heads", "vs": "spatial_merge_size",
        "vo": "out_hidden_size", "vt": "temporal_patch_size", "vy": "patch_size", "vx": "patch_size",
        "vc": "in_channels", "vp": "num_position_embeddings",
    }  # fmt: skip
    return sizes.DIMS | {name: f"{prefix}{key}" for name, key in keys.items()}


VISION_PREFIXES = {"model.visual.": ("model.visual.", "visual."), "model.": ("model.language_model.", "model.")}


def _merger(target: str, source: str, norm: str) -> tuple[Rule, ...]:
    """A perceptron that joins neighbouring patches; repositories name its parts in two ways."""
    parts = (
        ("ln_q.scale", "norm.weight", "ln_q.weight", f"{norm} -> {norm}"),
        ("ln_q.bias", "norm.bias", "ln_q.bias", f"{norm} -> {norm}"),
        ("mlp_0.kernel", "linear_fc1.weight", "mlp.0.weight", "vs*vs*ve ve*vs*vs -> ve*vs*vs vs*vs*ve"),
        ("mlp_0.bias", "linear_fc1.bias", "mlp.0.bias", "vs*vs*ve -> vs*vs*ve"),
        ("mlp_2.kernel", "linear_fc2.weight", "mlp.2.weight", "vo vs*vs*ve -> vs*vs*ve vo"),
        ("mlp_2.bias", "linear_fc2.bias", "mlp.2.bias", "vo -> vo"),
    )
    return tuple(
        Rule(f"{target}{name}", f"{source}{new}", pattern, forms=(Form(f"{source}{old}", pattern),))
        for name, new, old, pattern in parts
    )


_THIRDS = (("query", "0/3"), ("key", "1/3"), ("value", "2/3"))

_BLOCK = (
    *rules(
        *((f"{part}.kernel", "qkv.weight", f"({third} vh ve/vh) ve -> ve vh ve/vh") for part, third in _THIRDS),
        *((f"{part}.bias", "qkv.bias", f"({third} vh ve/vh) -> vh ve/vh") for part, third in _THIRDS),
        ("out.kernel", "proj.weight", "ve (vh ve/vh) -> vh ve/vh ve"),
        ("out.bias", "proj.bias", "ve -> ve"),
        prefix="attn.attn.", source="attn.",
    ),
    *affine("ln1", "norm1", "ve -> ve", "ve -> ve", "scale"),
    *affine("ln2", "norm2", "ve -> ve", "ve -> ve", "scale"),
    *affine("mlp", "mlp.linear_fc1", "vf ve -> ve vf", "vf -> vf"),
    *affine("mlp_out", "mlp.linear_fc2", "ve vf -> vf ve", "ve -> ve"),
)  # fmt: skip


def vision_tower(
    name: str,
    *,
    prefix: str = _PREFIX,
    source: str = "model.visual.",
    deepstack: str | None = None,
    rules: tuple[Rule, ...] = (),
    stacks: tuple[Stack, ...] = (),
    audio: bool = False,
) -> Tower:
    """The tower whose modules' names begin with `name` in MaxText and whose tensors' with `source`.

    `deepstack` names the mergers of intermediate layers; `rules` and `stacks` are what comes beside it, `audio` says
    whether that hears.
    """
    encoder, projector = f"vision_encoder.{name}VisionEncoder_0", f"vision_encoder.{name}VisionProjector_0"
    merger, layers = _merger("", "", "ve*vs*vs"), f"{prefix}deepstack_layers"
    mergers = Stack(f"{encoder}.merger", f"{source}{deepstack}.", merger, layers=layers, scanned="")
    return Tower(
        rules=(
            *affine(
                f"{encoder}.patch_embed.proj",
                f"{source}patch_embed.proj",
                "ve vc vt vy vx -> vt vy vx vc ve",
                "ve -> ve",
            ),
            Rule(f"{encoder}.pos_embed_interpolate.pos_embed", f"{source}pos_embed.weight", "vp ve -> vp ve"),
            *_merger(f"{projector}.merger.", f"{source}merger.", "ve"),
            *rules,
        ),
        stacks=(
            Stack(f"{encoder}.blocks", f"{source}blocks.", _BLOCK, layers=f"{prefix}depth", scanned=""),
            *((mergers,) if deepstack else ()),
            *stacks,
        ),
        scans=_DEEPSTACK if deepstack else "",
        audio=audio,
    )
