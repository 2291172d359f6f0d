"""OLMo 3. Three layers of sliding attention, then one of full attention; the norms of query and key span all heads."""

from __future__ import annotations

from converter.families import common
from converter.rules import Family, Slot, Stack

_LAYER = (
    *common.attention("attention"),
    *common.mlp(),
    *common.rules(
        ("attention.query_norm.scale", "self_attn.q_norm.weight", "qd -> qd"),
        ("attention.key_norm.scale", "self_attn.k_norm.weight", "kd -> kd"),
        ("post_self_attention_layer_norm.scale", "post_attention_layernorm.weight", "e -> e"),
        ("post_mlp_layer_norm.scale", "post_feedforward_layernorm.weight", "e -> e"),
    ),
)

OLMO3 = Family(
    name="olmo3",
    decoder_block="olmo3",
    architectures=("Olmo3ForCausalLM",),
    model_types=("olmo3",),
    defaults={
        "head_dim": common.heads_share_width,
        "num_key_value_heads": common.query_heads,
        "tie_word_embeddings": False,
        "query_size": common.product("num_attention_heads", "head_dim"),
        "key_size": common.product("num_key_value_heads", "head_dim"),
    },
    dims={**common.DIMS, "qd": "query_size", "kd": "key_size"},
    rules=common.DECODER,
    stacks=(Stack("decoder.layers", "model.layers.", _LAYER, slots=tuple(Slot(f"layers_{i}") for i in range(4))),),
    ignored=(common.INV_FREQ,),
    words=common.WORDS,
)
