"""Llama 2 to 3.3, Mistral and Phi 4: one architecture, two layouts of the rotary embedding.

MaxText's attention multiplies the query by nothing, so 1/sqrt(head_dim) goes into its kernel; its Llama 3.1 rotary
embedding rotates neighbouring pairs, every other one rotates halves, as the repositories do (MaxText 0.2.5
layers/attentions.py and layers/embeddings.py). Phi 4 is a Llama whose matrices are stored joined.
"""

from converter import sizes
from converter.families import common
from converter.rules import Config, HalvesToPairs, Op, Rule, Scale, rules


def query_scale(config: Config) -> float:
    return float(config["head_dim"] ** -0.5)


def _layer(*rotary: Op) -> tuple[Rule, ...]:
    return (*common.attention(query=(*rotary, Scale(query_scale)), key=rotary), *common.mlp(), *common.NORMS)


_QKV, _GATE_UP = "self_attn.qkv_proj.weight", "mlp.gate_up_proj.weight"

_JOINED = (
    Rule("self_attention.query.kernel", _QKV, "(<q d> | k d | k d) e -> e q d", (Scale(query_scale),)),
    *rules(
        ("self_attention.key.kernel", _QKV, "(q d | <k d> | k d) e -> e k d"),
        ("self_attention.value.kernel", _QKV, "(q d | k d | <k d>) e -> e k d"),
        ("self_attention.out.kernel", "self_attn.o_proj.weight", "e (q d) -> q d e"),
        ("mlp.wi_0.kernel", _GATE_UP, "(0/2 f) e -> e f"),
        ("mlp.wi_1.kernel", _GATE_UP, "(1/2 f) e -> e f"),
        ("mlp.wo.kernel", "mlp.down_proj.weight", "e f -> f e"),
    ),
    *common.NORMS,
)

_ROTATED = _layer(HalvesToPairs("d"))
_SIZES = {"head_dim": sizes.heads_share_width, "num_key_value_heads": sizes.query_heads}
_GROUPED = {**_SIZES, "num_key_value_heads": 8}
_LLAMA = "LlamaForCausalLM"

LLAMA2 = common.family("llama2", "llama2", _LLAMA, "llama", _layer(), defaults=_SIZES)
LLAMA31 = common.family("llama3.1", "llama2", _LLAMA, "llama", _ROTATED, defaults=_SIZES, rope_type="llama3.1")
MISTRAL = common.family("mistral", "mistral", "MistralForCausalLM", "mistral", _layer(), defaults=_GROUPED)
PHI4 = common.family("phi4", "llama2", "Phi3ForCausalLM", "phi3", _JOINED, defaults=_SIZES)
