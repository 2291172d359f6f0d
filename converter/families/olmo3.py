"""OLMo 3. Three layers of sliding attention, then one of full attention; the norms of query and key span all heads."""

from converter import sizes
from converter.families import common
from converter.rules import rules, slots

_LAYER = (
    *common.attention("attention"),
    *common.mlp(),
    *rules(
        ("attention.query_norm.scale", "self_attn.q_norm.weight", "q*d -> q*d"),
        ("attention.key_norm.scale", "self_attn.k_norm.weight", "k*d -> k*d"),
        ("post_self_attention_layer_norm.scale", "post_attention_layernorm.weight", "e -> e"),
        ("post_mlp_layer_norm.scale", "post_feedforward_layernorm.weight", "e -> e"),
    ),
)

OLMO3 = common.family(
    "olmo3", "olmo3", "Olmo3ForCausalLM", "olmo3", _LAYER, slots=slots("layers", 4),
    defaults={"head_dim": sizes.heads_share_width, "num_key_value_heads": sizes.query_heads},
)  # fmt: skip
