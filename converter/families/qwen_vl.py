"""Qwen3-VL and Qwen3-Omni: Qwen 3 with a vision tower, Omni with an audio tower too.

Only Omni's thinker has a place in MaxText; what speaks is left out.
"""

from __future__ import annotations

from collections.abc import Mapping

from converter.families.common import (
    DECODER,
    DENSE_WORDS,
    DIMS,
    EXPERT_DIMS,
    EXPERT_WORDS,
    TIED,
    expert_count,
    expert_geometry,
    geometry,
)
from converter.families.qwen import DENSE_LAYER, MOE_LAYER
from converter.families.qwen_vision import VISION_DEFAULTS, VISION_DIMS, vision_defaults, vision_dims, vision_tower
from converter.rules import Family, Model, Rule, Stack

_PREFIXES: Mapping[str, tuple[str, ...]] = {
    "model.visual.": ("model.visual.", "visual."),
    "model.": ("model.language_model.", "model."),
}

_BESIDE = (r"(model\.)?visual\..*",)

_TOWER = vision_tower("Qwen3VL", deepstack="deepstack_merger_list")

_2B = geometry(2048, 6144, 28, 16, 8, vocab=151936, tied=True, head_dim=128)
_4B = geometry(2560, 9728, 36, 32, 8, vocab=151936, tied=True, head_dim=128)
_8B = geometry(4096, 12288, 36, 32, 8, vocab=151936, head_dim=128)
_30B = expert_geometry(2048, 768, 48, 32, 4, 128, per_token=8, vocab=151936, head_dim=128)

QWEN3_VL = Family(
    name="qwen3-vl",
    decoder_block="qwen3",
    architectures=("Qwen3VLForConditionalGeneration",),
    model_types=("qwen3_vl",),
    defaults={"head_dim": 128, "num_key_value_heads": 32, "tie_word_embeddings": False, **VISION_DEFAULTS},
    dims={**DIMS, **VISION_DIMS},
    rules=DECODER,
    stacks=(Stack("decoder.layers", "model.layers.", DENSE_LAYER),),
    text="text_config",
    tower=_TOWER,
    prefixes=_PREFIXES,
    beside=_BESIDE,
    equal=TIED,
    words=DENSE_WORDS,
    models={
        "qwen3-vl-2b": Model("Qwen/Qwen3-VL-2B-Instruct", _2B, "converter"),
        "qwen3-vl-4b": Model("Qwen/Qwen3-VL-4B-Instruct", _4B, "converter"),
        "qwen3-vl-8b": Model("Qwen/Qwen3-VL-8B-Instruct", _8B),
    },
)

QWEN3_VL_MOE = Family(
    name="qwen3-vl-moe",
    decoder_block="qwen3_moe",
    architectures=("Qwen3VLMoeForConditionalGeneration",),
    model_types=("qwen3_vl_moe",),
    defaults={
        "head_dim": 128,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
        "num_experts": expert_count,
        **VISION_DEFAULTS,
    },
    dims={**EXPERT_DIMS, **VISION_DIMS},
    rules=DECODER,
    stacks=(Stack("decoder.layers", "model.layers.", MOE_LAYER),),
    text="text_config",
    tower=_TOWER,
    prefixes=_PREFIXES,
    beside=_BESIDE,
    words=EXPERT_WORDS,
    models={"qwen3-vl-30b-a3b": Model("Qwen/Qwen3-VL-30B-A3B-Instruct", _30B, "converter")},
)

_AUDIO = "audio_encoder.Qwen3OmniAudioEncoder_0"
_PROJECTOR = "audio_encoder.Qwen3OmniAudioProjector_0"
_SOURCE = "thinker.audio_tower."


def _linear(target: str, source: str, pattern: str, bias: str) -> tuple[Rule, Rule]:
    return Rule(f"{target}.kernel", f"{source}.weight", pattern), Rule(f"{target}.bias", f"{source}.bias", bias)


def _norm(target: str, source: str) -> tuple[Rule, Rule]:
    return Rule(f"{target}.scale", f"{source}.weight", "ae -> ae"), Rule(f"{target}.bias", f"{source}.bias", "ae -> ae")


_AUDIO_RULES = (
    *_linear(f"{_AUDIO}.conv2d1", f"{_SOURCE}conv2d1", "ac 1 3 3 -> 3 3 1 ac", "ac -> ac"),
    *_linear(f"{_AUDIO}.conv2d2", f"{_SOURCE}conv2d2", "ac ab 3 3 -> 3 3 ab ac", "ac -> ac"),
    *_linear(f"{_AUDIO}.conv2d3", f"{_SOURCE}conv2d3", "ac ab 3 3 -> 3 3 ab ac", "ac -> ac"),
    Rule(f"{_AUDIO}.conv_out.kernel", f"{_SOURCE}conv_out.weight", "ae ai -> ai ae"),
    *_norm(f"{_AUDIO}.layernorm_post", f"{_SOURCE}ln_post"),
    *_linear(f"{_PROJECTOR}.proj1", f"{_SOURCE}proj1", "ap ae -> ae ap", "ap -> ap"),
    *_linear(f"{_PROJECTOR}.proj2", f"{_SOURCE}proj2", "ao ae -> ae ao", "ao -> ao"),
)

_AUDIO_LAYER = (
    *_norm("input_layer_norm", "self_attn_layer_norm"),
    *_norm("post_attention_layer_norm", "final_layer_norm"),
    *(
        rule
        for part, source in (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj"))
        for rule in _linear(
            f"self_attention_audio.{part}", f"self_attn.{source}", "(ah ad) ae -> ae ah ad", "(ah ad) -> ah ad"
        )
    ),
    *_linear("self_attention_audio.out", "self_attn.out_proj", "ae (ah ad) -> ah ad ae", "ae -> ae"),
    *_linear("AudioMLP.wi", "fc1", "af ae -> ae af", "af -> af"),
    *_linear("AudioMLP.wo", "fc2", "ae af -> af ae", "ae -> ae"),
)

_VISION = "thinker_config.vision_config."
_EAR = "thinker_config.audio_config."
_CONVOLUTIONS = 3
"""Each halves the number of mel bins."""


def _bins(bins: int) -> int:
    for _ in range(_CONVOLUTIONS):
        bins = (bins + 1) // 2
    return bins


QWEN3_OMNI = Family(
    name="qwen3-omni",
    decoder_block="qwen3_moe",
    architectures=("Qwen3OmniMoeForConditionalGeneration", "Qwen3OmniMoeThinkerForConditionalGeneration"),
    model_types=("qwen3_omni_moe",),
    defaults={
        "head_dim": 128,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
        "num_experts": expert_count,
        **vision_defaults(_VISION),
        f"{_EAR}head_dim": lambda c: (
            c[f"{_EAR}d_model"] // c[f"{_EAR}encoder_attention_heads"] if f"{_EAR}d_model" in c else None
        ),
        f"{_EAR}convolved_size": lambda c: (
            c[f"{_EAR}downsample_hidden_size"] * _bins(c[f"{_EAR}num_mel_bins"]) if f"{_EAR}num_mel_bins" in c else None
        ),
    },
    dims={
        **EXPERT_DIMS,
        **vision_dims(_VISION),
        "ae": f"{_EAR}d_model",
        "ap": f"{_EAR}d_model",
        "ac": f"{_EAR}downsample_hidden_size",
        "ab": f"{_EAR}downsample_hidden_size",
        "ai": f"{_EAR}convolved_size",
        "ao": f"{_EAR}output_dim",
        "ah": f"{_EAR}encoder_attention_heads",
        "ad": f"{_EAR}head_dim",
        "af": f"{_EAR}encoder_ffn_dim",
    },
    rules=DECODER,
    stacks=(Stack("decoder.layers", "model.layers.", MOE_LAYER),),
    text="thinker_config.text_config",
    tower=vision_tower(
        "Qwen3OmniMoe",
        prefix=_VISION,
        source="thinker.visual.",
        deepstack="merger_list",
        rules=_AUDIO_RULES,
        stacks=(
            Stack(f"{_AUDIO}.layers", f"{_SOURCE}layers.", _AUDIO_LAYER, layers=f"{_EAR}encoder_layers", scanned=""),
        ),
        audio=True,
    ),
    prefixes={"model.": ("thinker.model.",), "lm_head.": ("thinker.lm_head.",)},
    ignored=(r"(talker|code2wav)\..*",),
    beside=(r"thinker\.(visual|audio_tower)\..*",),
    words=EXPERT_WORDS,
    models={
        "qwen3-omni-30b-a3b": Model("Qwen/Qwen3-Omni-30B-A3B-Instruct", {**_30B, "vocab_size": 152064}, "converter"),
    },
)
