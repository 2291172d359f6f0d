"""Gemma 3. Five layers of local attention, then one of global attention; layers after the last whole six stay apart.

The embedding is stored multiplied by sqrt(hidden_size), which is rounded to bfloat16 first, as transformers does;
norm scales are stored as 1 + w and stay float32, which bfloat16 cannot hold.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from converter.families.common import DENSE_WORDS, DIMS, TIED, attention, geometry, mlp
from converter.rules import AddOne, Config, Family, Model, Rule, Scale, Slot, Stack, Tower


def embedding_scale(config: Config) -> float:
    return float(np.sqrt(config["hidden_size"]).astype(ml_dtypes.bfloat16))


def _norm(target: str, source: str, dim: str = "e") -> Rule:
    return Rule(f"{target}.scale", f"{source}.weight", f"{dim} -> {dim}", (AddOne(),), dtype="float32")


_LAYER = (
    *attention(),
    *mlp(),
    _norm("self_attention.query_norm", "self_attn.q_norm", "d"),
    _norm("self_attention.key_norm", "self_attn.k_norm", "d"),
    _norm("pre_self_attention_norm", "input_layernorm"),
    _norm("post_self_attention_norm", "post_attention_layernorm"),
    _norm("pre_ffw_norm", "pre_feedforward_layernorm"),
    _norm("post_ffw_norm", "post_feedforward_layernorm"),
)

_ENCODER = "vision_encoder.Gemma3VisionEncoderLayer_0"
_EMBEDDER = "vision_encoder.VisionEmbedder_0"
_ATTENTION = "MultiHeadDotProductAttention_0"


def _affine(target: str, source: str, pattern: str, bias: str, name: str = "kernel") -> tuple[Rule, Rule]:
    return Rule(f"{target}.{name}", f"{source}.weight", pattern), Rule(f"{target}.bias", f"{source}.bias", bias)


_BLOCK = (
    *_affine("LayerNorm_0", "layer_norm1", "ve -> ve", "ve -> ve", "scale"),
    *_affine("LayerNorm_1", "layer_norm2", "ve -> ve", "ve -> ve", "scale"),
    *_affine("MlpBlockViT_0.Dense_0", "mlp.fc1", "vf ve -> ve vf", "vf -> vf"),
    *_affine("MlpBlockViT_0.Dense_1", "mlp.fc2", "ve vf -> vf ve", "ve -> ve"),
    *_affine(f"{_ATTENTION}.query", "self_attn.q_proj", "(vh vd) ve -> ve vh vd", "(vh vd) -> vh vd"),
    *_affine(f"{_ATTENTION}.key", "self_attn.k_proj", "(vh vd) ve -> ve vh vd", "(vh vd) -> vh vd"),
    *_affine(f"{_ATTENTION}.value", "self_attn.v_proj", "(vh vd) ve -> ve vh vd", "(vh vd) -> vh vd"),
    *_affine(f"{_ATTENTION}.out", "self_attn.out_proj", "ve (vh vd) -> vh vd ve", "ve -> ve"),
)

_PATCHES = "vision_tower.embeddings.patch_embedding"
_PROJECTOR = "multi_modal_projector"

_TOWER = Tower(
    rules=(
        *_affine(f"{_ENCODER}.embedding", _PATCHES, "ve vc vy vx -> vy vx vc ve", "ve -> ve"),
        Rule(f"{_ENCODER}.pos_embedding", "vision_tower.embeddings.position_embedding.weight", "vp ve -> 1 vp ve"),
        *_affine(
            f"{_ENCODER}.Transformer.encoder_norm", "vision_tower.post_layernorm", "ve -> ve", "ve -> ve", "scale"
        ),
        Rule(f"{_EMBEDDER}.mm_input_projection.w", f"{_PROJECTOR}.mm_input_projection_weight", "ve e -> ve e"),
        _norm(f"{_EMBEDDER}.mm_soft_embedding_norm", f"{_PROJECTOR}.mm_soft_emb_norm", "ve"),
    ),
    stacks=(
        Stack(
            f"{_ENCODER}.Transformer.encoderblock",
            "vision_tower.encoder.layers.",
            _BLOCK,
            layers="vision_config.num_hidden_layers",
            scanned="",
        ),
    ),
)

_NEVER_SEEN = r"(model\.)?vision_tower\.(vision_model\.)?head\..*"

GEMMA3 = Family(
    name="gemma3",
    decoder_block="gemma3",
    architectures=("Gemma3ForConditionalGeneration", "Gemma3ForCausalLM"),
    model_types=("gemma3", "gemma3_text"),
    defaults={
        "head_dim": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "vocab_size": 262208,
        "tie_word_embeddings": True,
        "vision_config.num_channels": 3,
        "vision_config.head_dim": lambda c: (
            c["vision_config.hidden_size"] // c["vision_config.num_attention_heads"]
            if "vision_config.hidden_size" in c
            else None
        ),
        "vision_config.patches": lambda c: (
            (c["vision_config.image_size"] // c["vision_config.patch_size"]) ** 2
            if "vision_config.image_size" in c
            else None
        ),
    },
    dims={
        **DIMS,
        "ve": "vision_config.hidden_size",
        "vf": "vision_config.intermediate_size",
        "vh": "vision_config.num_attention_heads",
        "vd": "vision_config.head_dim",
        "vc": "vision_config.num_channels",
        "vy": "vision_config.patch_size",
        "vx": "vision_config.patch_size",
        "vp": "vision_config.patches",
    },
    rules=(
        Rule("token_embedder.embedding", "model.embed_tokens.weight", "v e -> v e", (Scale(embedding_scale),)),
        _norm("decoder.decoder_norm", "model.norm"),
    ),
    stacks=(
        Stack(
            "decoder.layers",
            "model.layers.",
            _LAYER,
            slots=tuple(Slot(f"layers_{i}") for i in range(6)),
            remainder="decoder.layers_remainder",
        ),
    ),
    text="text_config",
    tower=_TOWER,
    prefixes={
        "model.": ("model.language_model.", "language_model.model.", "model."),
        "lm_head.": ("language_model.lm_head.", "lm_head."),
        "vision_tower.": (
            "vision_tower.vision_model.",
            "model.vision_tower.vision_model.",
            "model.vision_tower.",
            "vision_tower.",
        ),
        "multi_modal_projector.": ("model.multi_modal_projector.", "multi_modal_projector."),
    },
    ignored=(_NEVER_SEEN,),
    beside=(r"(model\.)?(vision_tower|multi_modal_projector)\..*",),
    equal=TIED,
    # MaxText has no place for the tokens of images (configs/models/gemma3-*.yml).
    vocabulary={262208: 262144},
    words=DENSE_WORDS,
    models={
        "gemma3-1b": Model(
            "google/gemma-3-1b-it", geometry(1152, 6912, 26, 4, 1, vocab=262144, head_dim=256, tied=True)
        ),
        "gemma3-4b": Model(
            "google/gemma-3-4b-it", geometry(2560, 10240, 34, 8, 4, vocab=262208, head_dim=256, tied=True), "converter"
        ),
        "gemma3-12b": Model(
            "google/gemma-3-12b-it",
            geometry(3840, 15360, 48, 16, 8, vocab=262208, head_dim=256, tied=True),
            "converter",
        ),
        "gemma3-27b": Model(
            "google/gemma-3-27b-it",
            geometry(5376, 21504, 62, 32, 16, vocab=262208, head_dim=128, tied=True),
            "converter",
        ),
    },
)
