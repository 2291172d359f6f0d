"""Qwen3-VL and Qwen3-Omni: Qwen 3 with a vision tower, Omni with an audio tower too.

Only Omni's thinker has a place in MaxText; what speaks is left out.
"""

from typing import Any

from converter import sizes
from converter.families import common
from converter.families.qwen import DENSE_DEFAULTS, DENSE_LAYER, MOE_DEFAULTS, MOE_LAYER
from converter.families.qwen_vision import VISION_PREFIXES, vision_defaults, vision_dims, vision_tower
from converter.rules import Family, Rule, Stack, affine


def _vl(name: str, block: str, architecture: str, layer: tuple[Rule, ...], **more: Any) -> Family:
    return common.family(
        name, block, architecture, block.replace("qwen3", "qwen3_vl"), layer, text="text_config", dims=vision_dims(),
        tower=vision_tower("Qwen3VL", deepstack="deepstack_merger_list"), prefixes=VISION_PREFIXES,
        beside=(r"(model\.)?visual\..*",), **more,
    )  # fmt: skip


QWEN3_VL = _vl(
    "qwen3-vl", "qwen3", "Qwen3VLForConditionalGeneration", DENSE_LAYER,
    defaults={**DENSE_DEFAULTS, **vision_defaults()},
)  # fmt: skip
QWEN3_VL_MOE = _vl(
    "qwen3-vl-moe", "qwen3_moe", "Qwen3VLMoeForConditionalGeneration", MOE_LAYER, words=sizes.EXPERT_WORDS,
    defaults={**MOE_DEFAULTS, **vision_defaults()},
)  # fmt: skip

_VISION, _EAR = "thinker_config.vision_config.", "thinker_config.audio_config."
_AUDIO, _PROJECTOR = "audio_encoder.Qwen3OmniAudioEncoder_0", "audio_encoder.Qwen3OmniAudioProjector_0"
_SOURCE = "thinker.audio_tower."

_AUDIO_RULES = (
    *affine(f"{_AUDIO}.conv2d1", f"{_SOURCE}conv2d1", "ac 1 3 3 -> 3 3 1 ac", "ac -> ac"),
    *affine(f"{_AUDIO}.conv2d2", f"{_SOURCE}conv2d2", "ac ab 3 3 -> 3 3 ab ac", "ac -> ac"),
    *affine(f"{_AUDIO}.conv2d3", f"{_SOURCE}conv2d3", "ac ab 3 3 -> 3 3 ab ac", "ac -> ac"),
    Rule(f"{_AUDIO}.conv_out.kernel", f"{_SOURCE}conv_out.weight", "ae ac*ai -> ac*ai ae"),
    *affine(f"{_AUDIO}.layernorm_post", f"{_SOURCE}ln_post", "ae -> ae", "ae -> ae", "scale"),
    *affine(f"{_PROJECTOR}.proj1", f"{_SOURCE}proj1", "ap ae -> ae ap", "ap -> ap"),
    *affine(f"{_PROJECTOR}.proj2", f"{_SOURCE}proj2", "ao ae -> ae ao", "ao -> ao"),
)

_HEADS, _HEAD = "self_attention_audio", ("(ah ae/ah) ae -> ae ah ae/ah", "(ah ae/ah) -> ah ae/ah")

_AUDIO_LAYER = (
    *affine("input_layer_norm", "self_attn_layer_norm", "ae -> ae", "ae -> ae", "scale"),
    *affine("post_attention_layer_norm", "final_layer_norm", "ae -> ae", "ae -> ae", "scale"),
    *affine(f"{_HEADS}.query", "self_attn.q_proj", *_HEAD),
    *affine(f"{_HEADS}.key", "self_attn.k_proj", *_HEAD),
    *affine(f"{_HEADS}.value", "self_attn.v_proj", *_HEAD),
    *affine(f"{_HEADS}.out", "self_attn.out_proj", "ae (ah ae/ah) -> ah ae/ah ae", "ae -> ae"),
    *affine("AudioMLP.wi", "fc1", "af ae -> ae af", "af -> af"),
    *affine("AudioMLP.wo", "fc2", "ae af -> af ae", "ae -> ae"),
)


def _convolved(bins: int) -> int:
    """How many of the mel bins three convolutions of stride two leave."""
    for _ in range(3):
        bins = (bins + 1) // 2
    return bins


QWEN3_OMNI = common.family(
    "qwen3-omni", "qwen3_moe",
    "Qwen3OmniMoeForConditionalGeneration Qwen3OmniMoeThinkerForConditionalGeneration", "qwen3_omni_moe", MOE_LAYER,
    defaults={
        **MOE_DEFAULTS, **vision_defaults(_VISION),
        f"{_EAR}bins": lambda c: _convolved(c[f"{_EAR}num_mel_bins"]) if f"{_EAR}num_mel_bins" in c else None,
    },
    dims={
        **vision_dims(_VISION), "ae": f"{_EAR}d_model", "ap": f"{_EAR}d_model", "ac": f"{_EAR}downsample_hidden_size",
        "ab": f"{_EAR}downsample_hidden_size", "ai": f"{_EAR}bins", "ao": f"{_EAR}output_dim",
        "ah": f"{_EAR}encoder_attention_heads", "af": f"{_EAR}encoder_ffn_dim",
    },
    text="thinker_config.text_config",
    tower=vision_tower(
        "Qwen3OmniMoe", prefix=_VISION, source="thinker.visual.", deepstack="merger_list", rules=_AUDIO_RULES,
        stacks=(
            Stack(f"{_AUDIO}.layers", f"{_SOURCE}layers.", _AUDIO_LAYER, layers=f"{_EAR}encoder_layers", scanned=""),
        ),
        audio=True,
    ),
    prefixes={"model.": ("thinker.model.",), "lm_head.": ("thinker.lm_head.",)},
    ignored=(r"(talker|code2wav)\..*",),
    beside=(r"thinker\.(visual|audio_tower)\..*",),
    words=sizes.EXPERT_WORDS,
)  # fmt: skip
