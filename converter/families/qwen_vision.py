"""The vision tower of Qwen3-VL, Qwen3-Omni and Qwen3.5. MaxText never scans its blocks.

Query, key and value are one matrix in the repositories; the patch embedding is a convolution in three dimensions.
"""

from __future__ import annotations

from converter.rules import Config, Form, Rule, Stack, Tower

DEEPSTACK = "MaxText feeds the vision tower's intermediate layers into single decoder layers, which it does not scan"

_PREFIX = "vision_config."


def _deepstack(config: Config, prefix: str) -> int:
    return len(config.get(f"{prefix}deepstack_visual_indexes") or ())


def vision_defaults(prefix: str = _PREFIX) -> dict[str, object]:
    """Derived sizes; `prefix` is where in config.json the vision tower's keys are."""
    return {
        f"{prefix}head_dim": lambda c: (
            c[f"{prefix}hidden_size"] // c[f"{prefix}num_heads"] if f"{prefix}hidden_size" in c else None
        ),
        f"{prefix}merged_size": lambda c: (
            c[f"{prefix}hidden_size"] * c[f"{prefix}spatial_merge_size"] ** 2 if f"{prefix}hidden_size" in c else None
        ),
        f"{prefix}deepstack_layers": lambda c: _deepstack(c, prefix),
    }


def vision_dims(prefix: str = _PREFIX) -> dict[str, str]:
    """The dimensions of the vision tower's patterns."""
    return {
        "ve": f"{prefix}hidden_size",
        "vf": f"{prefix}intermediate_size",
        "vh": f"{prefix}num_heads",
        "vd": f"{prefix}head_dim",
        "vm": f"{prefix}merged_size",
        "vn": f"{prefix}merged_size",
        "vo": f"{prefix}out_hidden_size",
        "vt": f"{prefix}temporal_patch_size",
        "vy": f"{prefix}patch_size",
        "vx": f"{prefix}patch_size",
        "vc": f"{prefix}in_channels",
        "vp": f"{prefix}num_position_embeddings",
    }


VISION_DEFAULTS = vision_defaults()
VISION_DIMS = vision_dims()


def _merger(target: str, source: str, norm: str) -> tuple[Rule, ...]:
    """A perceptron that joins neighbouring patches; repositories name its parts in two ways."""
    parts = (
        ("ln_q.scale", "norm.weight", "ln_q.weight", f"{norm} -> {norm}"),
        ("ln_q.bias", "norm.bias", "ln_q.bias", f"{norm} -> {norm}"),
        ("mlp_0.kernel", "linear_fc1.weight", "mlp.0.weight", "vn vm -> vm vn"),
        ("mlp_0.bias", "linear_fc1.bias", "mlp.0.bias", "vn -> vn"),
        ("mlp_2.kernel", "linear_fc2.weight", "mlp.2.weight", "vo vn -> vn vo"),
        ("mlp_2.bias", "linear_fc2.bias", "mlp.2.bias", "vo -> vo"),
    )
    return tuple(
        Rule(f"{target}{name}", f"{source}{new}", pattern, forms=(Form(f"{source}{old}", pattern),))
        for name, new, old, pattern in parts
    )


def _block() -> tuple[Rule, ...]:
    thirds = (("query", "0/3"), ("key", "1/3"), ("value", "2/3"))
    return (
        *(Rule(f"attn.attn.{part}.kernel", "attn.qkv.weight", f"({i} vh vd) ve -> ve vh vd") for part, i in thirds),
        *(Rule(f"attn.attn.{part}.bias", "attn.qkv.bias", f"({i} vh vd) -> vh vd") for part, i in thirds),
        Rule("attn.attn.out.kernel", "attn.proj.weight", "ve (vh vd) -> vh vd ve"),
        Rule("attn.attn.out.bias", "attn.proj.bias", "ve -> ve"),
        Rule("ln1.scale", "norm1.weight", "ve -> ve"),
        Rule("ln1.bias", "norm1.bias", "ve -> ve"),
        Rule("ln2.scale", "norm2.weight", "ve -> ve"),
        Rule("ln2.bias", "norm2.bias", "ve -> ve"),
        Rule("mlp.kernel", "mlp.linear_fc1.weight", "vf ve -> ve vf"),
        Rule("mlp.bias", "mlp.linear_fc1.bias", "vf -> vf"),
        Rule("mlp_out.kernel", "mlp.linear_fc2.weight", "ve vf -> vf ve"),
        Rule("mlp_out.bias", "mlp.linear_fc2.bias", "ve -> ve"),
    )


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
    """The tower of one family.

    Args:
      name: how MaxText's names of its modules begin.
      prefix: where in config.json its keys are.
      source: how its tensors' names begin.
      deepstack: the name of the mergers of intermediate layers; None where there are none.
      rules, stacks: what comes beside it.
      audio: whether that hears.
    """
    encoder, projector = f"vision_encoder.{name}VisionEncoder_0", f"vision_encoder.{name}VisionProjector_0"
    mergers = Stack(
        f"{encoder}.merger",
        f"{source}{deepstack}.",
        _merger("", "", "vm"),
        layers=f"{prefix}deepstack_layers",
        scanned="",
    )
    return Tower(
        rules=(
            Rule(
                f"{encoder}.patch_embed.proj.kernel",
                f"{source}patch_embed.proj.weight",
                "ve vc vt vy vx -> vt vy vx vc ve",
            ),
            Rule(f"{encoder}.patch_embed.proj.bias", f"{source}patch_embed.proj.bias", "ve -> ve"),
            Rule(f"{encoder}.pos_embed_interpolate.pos_embed", f"{source}pos_embed.weight", "vp ve -> vp ve"),
            *_merger(f"{projector}.merger.", f"{source}merger.", "ve"),
            *rules,
        ),
        stacks=(
            Stack(f"{encoder}.blocks", f"{source}blocks.", _block(), layers=f"{prefix}depth", scanned=""),
            *((mergers,) if deepstack else ()),
            *stacks,
        ),
        scans=DEEPSTACK if deepstack else "",
        audio=audio,
    )
