"""OLMo 3. Three layers of sliding attention, then one of full attention; the norms of query and key span all heads."""

from __future__ import annotations

from converter.families.common import DECODER, DENSE_WORDS, DIMS, INV_FREQ, attention, geometry, mlp
from converter.rules import Family, Model, Rule, Slot, Stack

_LAYER = (
    *attention("attention"),
    Rule("attention.query_norm.scale", "self_attn.q_norm.weight", "qd -> qd"),
    Rule("attention.key_norm.scale", "self_attn.k_norm.weight", "kd -> kd"),
    *mlp(),
    Rule("post_self_attention_layer_norm.scale", "post_attention_layernorm.weight", "e -> e"),
    Rule("post_mlp_layer_norm.scale", "post_feedforward_layernorm.weight", "e -> e"),
)

_7B = geometry(4096, 11008, 32, 32, 32, vocab=100278)
_32B = geometry(5120, 27648, 64, 40, 8, vocab=100278)

OLMO3 = Family(
    name="olmo3",
    decoder_block="olmo3",
    architectures=("Olmo3ForCausalLM",),
    model_types=("olmo3",),
    defaults={
        "head_dim": lambda c: c["hidden_size"] // c["num_attention_heads"],
        "num_key_value_heads": lambda c: c["num_attention_heads"],
        "tie_word_embeddings": False,
        "query_size": lambda c: c["num_attention_heads"] * c["head_dim"],
        "key_size": lambda c: c["num_key_value_heads"] * c["head_dim"],
    },
    dims={**DIMS, "qd": "query_size", "kd": "key_size"},
    rules=DECODER,
    stacks=(Stack("decoder.layers", "model.layers.", _LAYER, slots=tuple(Slot(f"layers_{i}") for i in range(4))),),
    ignored=(INV_FREQ,),
    words=DENSE_WORDS,
    models={
        "olmo3-7b": Model("allenai/Olmo-3-7B-Instruct", _7B, "converter"),
        "olmo3-7b-pt": Model("allenai/Olmo-3-1025-7B", _7B, "converter"),
        "olmo3-32b": Model("allenai/Olmo-3-32B-Think", _32B, "converter"),
    },
)
