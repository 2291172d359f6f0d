"""DeepSeek V2, V3 and V3.2: latent attention, dense layers first, then layers with routed and shared experts.

The bias that balances V3's routing is a collection of its own in MaxText 0.2.5, its layers first, and stays float32.
Layers that predict further tokens, which come last in V3's repositories, have no place in MaxText's model.
"""

from __future__ import annotations

from converter.families import common
from converter.rules import Config, Family, Rule, Stack


def _compressed(config: Config) -> bool:
    """Whether queries go through a low rank as keys and values do."""
    return bool(config["q_lora_rank"])


def _plain(config: Config) -> bool:
    return not _compressed(config)


_WHERE = {"prefix": "self_attention.", "source": "self_attn."}

_ATTENTION = (
    *common.rules(
        ("kv_norm.scale", "kv_a_layernorm.weight", "c -> c"),
        ("wkv_a.kernel", "kv_a_proj_with_mqa.weight", "ca e -> e ca"),
        ("wkv_b.kernel", "kv_b_proj.weight", "(q nv) c -> c q nv"),
        ("out.kernel", "o_proj.weight", "e (q vd) -> q vd e"),
        **_WHERE,
    ),
    *common.rules(("query.kernel", "q_proj.weight", "(q nr) e -> e q nr"), when=_plain, **_WHERE),
    *common.rules(
        ("q_norm.scale", "q_a_layernorm.weight", "qc -> qc"),
        ("wq_a.kernel", "q_a_proj.weight", "qc e -> e qc"),
        ("wq_b.kernel", "q_b_proj.weight", "(q nr) qc -> qc q nr"),
        when=_compressed, **_WHERE,
    ),
    *common.NORMS,
)  # fmt: skip

_INDEXER = common.rules(
    ("indexer.k_norm.scale", "indexer.k_norm.weight", "id -> id"),
    ("indexer.k_norm.bias", "indexer.k_norm.bias", "id -> id"),
    ("indexer.weights_proj.kernel", "indexer.weights_proj.weight", "ih e -> e ih"),
    ("indexer.wk.kernel", "indexer.wk.weight", "id e -> e id"),
    ("indexer.wq_b.kernel", "indexer.wq_b.weight", "(ih id) qc -> qc ih id"),
    **_WHERE,
)

_BLOCK = "DeepSeekMoeBlock_0"

_EXPERTS = (
    common.router(f"{_BLOCK}.MoeBlock_0"),
    *common.experts(f"{_BLOCK}.MoeBlock_0"),
    *common.mlp(f"{_BLOCK}.shared_experts", "mlp.shared_experts", "sm"),
)

_BIAS = Rule(
    f"{_BLOCK}.MoeBlock_0.gate.bias", "mlp.gate.e_score_correction_bias", "x -> x",
    dtype="float32", collection="MoEBiasVar", scan_axis=0,
)  # fmt: skip


def _family(
    name: str,
    architecture: str,
    model_type: str,
    *,
    indexer: tuple[Rule, ...] = (),
    bias: tuple[Rule, ...] = (_BIAS,),
    query_rank: int = 1536,
) -> Family:
    shared = (*_ATTENTION, *indexer)
    moe = (*shared, *_EXPERTS, *bias)
    return Family(
        name=name,
        decoder_block="deepseek",
        architectures=(architecture,),
        model_types=(model_type,),
        defaults={
            "num_key_value_heads": common.query_heads,
            "tie_word_embeddings": False,
            "num_experts": common.expert_count,
            # Null in V2-Lite, which does not compress its queries.
            "q_lora_rank": query_rank,
            "first_k_dense_replace": 0,
            "qk_head_dims": lambda c: c["qk_nope_head_dim"] + c["qk_rope_head_dim"],
            "kv_head_dims": lambda c: c["qk_nope_head_dim"] + c["v_head_dim"],
            "kv_a_dims": lambda c: c["kv_lora_rank"] + c["qk_rope_head_dim"],
            "shared_size": common.product("n_shared_experts", "moe_intermediate_size"),
        },
        dims={
            **common.EXPERT_DIMS, "c": "kv_lora_rank", "ca": "kv_a_dims", "qc": "q_lora_rank", "nr": "qk_head_dims",
            "nv": "kv_head_dims", "vd": "v_head_dim", "sm": "shared_size", "ih": "index_n_heads",
            "id": "index_head_dim",
        },
        rules=common.DECODER,
        stacks=(
            Stack("decoder.dense_layers", "model.layers.", (*shared, *common.mlp()), end="first_k_dense_replace"),
            Stack("decoder.moe_layers", "model.layers.", moe, first="first_k_dense_replace", restart=True),
        ),
        ignored=(common.INV_FREQ,),
        extra_layers="num_nextn_predict_layers",
        words={
            **{word: key for word, key in common.EXPERT_WORDS.items() if word != "head_dim"},
            "base_mlp_dim": "intermediate_size", "first_num_dense_layers": "first_k_dense_replace",
            "shared_experts": "n_shared_experts", **{key: key for key in _SAME_WORDS},
        },
    )  # fmt: skip


_SAME_WORDS = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")

DEEPSEEK2 = _family("deepseek2", "DeepseekV2ForCausalLM", "deepseek_v2", bias=(), query_rank=0)
DEEPSEEK3 = _family("deepseek3", "DeepseekV3ForCausalLM", "deepseek_v3")
DEEPSEEK32 = _family("deepseek3.2", "DeepseekV32ForCausalLM", "deepseek_v32", indexer=_INDEXER)
