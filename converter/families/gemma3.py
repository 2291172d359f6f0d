"""Gemma 3. Five layers of local attention, then one of global attention; layers after the last whole six stay apart.

The embedding is stored multiplied by sqrt(hidden_size), which is rounded to bfloat16 first, as transformers does;
norm scales are stored as in Gemma 2.
"""

import ml_dtypes
import numpy as np

from converter import sizes
from converter.families import common
from converter.families.gemma2 import norm
from converter.rules import Config, Rule, Scale, Stack, Tower, affine, slots


def embedding_scale(config: Config) -> float:
    return float(np.sqrt(config["hidden_size"]).astype(ml_dtypes.bfloat16))


_LAYER = (
    *common.attention(),
    *common.mlp(),
    norm("self_attention.query_norm", "self_attn.q_norm", dim="d"),
    norm("self_attention.key_norm", "self_attn.k_norm", dim="d"),
    norm("pre_self_attention_norm", "input_layernorm"),
    norm("post_self_attention_norm", "post_attention_layernorm"),
    norm("pre_ffw_norm", "pre_feedforward_layernorm"),
    norm("post_ffw_norm", "post_feedforward_layernorm"),
)

_ENCODER, _EMBEDDER = "vision_encoder.Gemma3VisionEncoderLayer_0", "vision_encoder.VisionEmbedder_0"
_IN, _BIAS, _OUT = "(vh ve/vh) ve -> ve vh ve/vh", "(vh ve/vh) -> vh ve/vh", "ve (vh ve/vh) -> vh ve/vh ve"
_HEADS = "MultiHeadDotProductAttention_0"
_POSITIONS = "vision_tower.embeddings.position_embedding.weight"
_PATCHES, _PROJECTOR = "vision_tower.embeddings.patch_embedding", "multi_modal_projector"

_BLOCK = (
    *affine("LayerNorm_0", "layer_norm1", "ve -> ve", "ve -> ve", "scale"),
    *affine("LayerNorm_1", "layer_norm2", "ve -> ve", "ve -> ve", "scale"),
    *affine("MlpBlockViT_0.Dense_0", "mlp.fc1", "vf ve -> ve vf", "vf -> vf"),
    *affine("MlpBlockViT_0.Dense_1", "mlp.fc2", "ve vf -> vf ve", "ve -> ve"),
    *affine(f"{_HEADS}.query", "self_attn.q_proj", _IN, _BIAS),
    *affine(f"{_HEADS}.key", "self_attn.k_proj", _IN, _BIAS),
    *affine(f"{_HEADS}.value", "self_attn.v_proj", _IN, _BIAS),
    *affine(f"{_HEADS}.out", "self_attn.out_proj", _OUT, "ve -> ve"),
)

_TRANSFORMER = f"{_ENCODER}.Transformer"
_TOWER = Tower(
    rules=(
        *affine(f"{_ENCODER}.embedding", _PATCHES, "ve vc vy vx -> vy vx vc ve", "ve -> ve"),
        Rule(f"{_ENCODER}.pos_embedding", _POSITIONS, "vi/vy*vi/vx ve -> 1 vi/vy*vi/vx ve"),
        *affine(f"{_TRANSFORMER}.encoder_norm", "vision_tower.post_layernorm", "ve -> ve", "ve -> ve", "scale"),
        Rule(f"{_EMBEDDER}.mm_input_projection.w", f"{_PROJECTOR}.mm_input_projection_weight", "ve e -> ve e"),
        norm(f"{_EMBEDDER}.mm_soft_embedding_norm", f"{_PROJECTOR}.mm_soft_emb_norm", dim="ve"),
    ),
    stacks=(
        Stack(
            f"{_TRANSFORMER}.encoderblock", "vision_tower.encoder.layers.", _BLOCK,
            layers="vision_config.num_hidden_layers", scanned="",
        ),
    ),
)  # fmt: skip

_VISION = "vision_config."

GEMMA3 = common.family(
    "gemma3", "gemma3", "Gemma3ForConditionalGeneration Gemma3ForCausalLM", "gemma3 gemma3_text", _LAYER,
    slots=slots("layers", 6), remainder="decoder.layers_remainder", text="text_config", tower=_TOWER,
    # Repositories of the 4b leave out what is transformers' default.
    defaults={
        "head_dim": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262208,
        "tie_word_embeddings": True, f"{_VISION}num_channels": 3,
    },
    dims={
        **sizes.DIMS, "ve": f"{_VISION}hidden_size", "vf": f"{_VISION}intermediate_size",
        "vh": f"{_VISION}num_attention_heads", "vc": f"{_VISION}num_channels", "vi": f"{_VISION}image_size",
        "vy": f"{_VISION}patch_size", "vx": f"{_VISION}patch_size",
    },
    rules=(
        Rule("token_embedder.embedding", "model.embed_tokens.weight", "v e -> v e", (Scale(embedding_scale),)),
        norm("decoder.decoder_norm", "model.norm"),
    ),
    prefixes={
        "model.": ("model.language_model.", "language_model.model.", "model."),
        "lm_head.": ("language_model.lm_head.", "lm_head."),
        "vision_tower.": (
            "vision_tower.vision_model.", "model.vision_tower.vision_model.", "model.vision_tower.", "vision_tower.",
        ),
        "multi_modal_projector.": ("model.multi_modal_projector.", "multi_modal_projector."),
    },
    ignored=(r"(model\.)?vision_tower\.(vision_model\.)?head\..*",),
    beside=(r"(model\.)?(vision_tower|multi_modal_projector)\..*",),
    # MaxText has no place for the tokens of images (configs/models/gemma3-*.yml).
    vocabulary={262208: 262144},
)  # fmt: skip
