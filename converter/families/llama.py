"""Llama 2 to 3.3, Mistral and Phi 4: one architecture, two layouts of the rotary embedding.

MaxText's attention multiplies the query by nothing, so 1/sqrt(head_dim) goes into its kernel; its Llama 3.1 rotary
embedding rotates neighbouring pairs, every other one rotates halves, as the repositories do (MaxText 0.2.5
layers/attentions.py and layers/embeddings.py). Phi 4 is a Llama whose matrices are stored joined.
"""

from __future__ import annotations

from converter.families import common
from converter.rules import Config, Family, HalvesToPairs, Op, Rule, Scale, Stack


def query_scale(config: Config) -> float:
    return float(config["head_dim"] ** -0.5)


def _family(
    name: str, block: str, architecture: str, model_type: str, layer: tuple[Rule, ...], rope_type: str = "default"
) -> Family:
    return Family(
        name=name,
        decoder_block=block,
        architectures=(architecture,),
        model_types=(model_type,),
        defaults={
            "head_dim": common.heads_share_width,
            "num_key_value_heads": 8 if model_type == "mistral" else common.query_heads,
            "tie_word_embeddings": False,
        },
        dims=common.DIMS,
        rules=common.DECODER,
        stacks=(Stack("decoder.layers", "model.layers.", (*layer, *common.NORMS)),),
        ignored=(common.INV_FREQ,),
        equal=common.TIED,
        rope_type=rope_type,
        words=common.WORDS,
    )


def _layer(*rotary: Op) -> tuple[Rule, ...]:
    return (*common.attention(query=(*rotary, Scale(query_scale)), key=rotary), *common.mlp())


_QKV, _GATE_UP = "self_attn.qkv_proj.weight", "mlp.gate_up_proj.weight"

_JOINED = (
    Rule("self_attention.query.kernel", _QKV, "(<q d> | k d | k d) e -> e q d", (Scale(query_scale),)),
    *common.rules(
        ("self_attention.key.kernel", _QKV, "(q d | <k d> | k d) e -> e k d"),
        ("self_attention.value.kernel", _QKV, "(q d | k d | <k d>) e -> e k d"),
        ("self_attention.out.kernel", "self_attn.o_proj.weight", "e (q d) -> q d e"),
        ("mlp.wi_0.kernel", _GATE_UP, "(0/2 f) e -> e f"),
        ("mlp.wi_1.kernel", _GATE_UP, "(1/2 f) e -> e f"),
        ("mlp.wo.kernel", "mlp.down_proj.weight", "e f -> f e"),
    ),
)

_PAIRS = HalvesToPairs("d")

LLAMA2 = _family("llama2", "llama2", "LlamaForCausalLM", "llama", _layer())
LLAMA31 = _family("llama3.1", "llama2", "LlamaForCausalLM", "llama", _layer(_PAIRS), rope_type="llama3.1")
MISTRAL = _family("mistral", "mistral", "MistralForCausalLM", "mistral", _layer())
PHI4 = _family("phi4", "llama2", "Phi3ForCausalLM", "phi3", _JOINED)
