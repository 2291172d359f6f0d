"""DeepSeek V2, V3 and V3.2: latent attention, dense layers first, then layers with routed and shared experts.

The bias that balances V3's routing is a collection of its own in MaxText 0.2.5, its layers first, and stays float32.
Layers that predict further tokens, which come last in V3's repositories, have no place in MaxText's model.
"""

from converter import sizes
from converter.families import common
from converter.rules import Config, Family, Rule, Stack, rules


def _kinds(config: Config, layer: int) -> set[str]:
    """Compressed: queries go through a low rank, as keys and values do."""
    return {"compressed"} if config["q_lora_rank"] else set()


_WHERE = {"prefix": "self_attention.", "source": "self_attn."}

_ATTENTION = (
    *rules(
        ("kv_norm.scale", "kv_a_layernorm.weight", "c -> c"),
        ("wkv_a.kernel", "kv_a_proj_with_mqa.weight", "c+qr e -> e c+qr"),
        ("wkv_b.kernel", "kv_b_proj.weight", "(q qn+vd) c -> c q qn+vd"),
        ("out.kernel", "o_proj.weight", "e (q vd) -> q vd e"),
        **_WHERE,
    ),
    *rules(("query.kernel", "q_proj.weight", "(q qn+qr) e -> e q qn+qr"), layers="!compressed", **_WHERE),
    *rules(
        ("q_norm.scale", "q_a_layernorm.weight", "qc -> qc"),
        ("wq_a.kernel", "q_a_proj.weight", "qc e -> e qc"),
        ("wq_b.kernel", "q_b_proj.weight", "(q qn+qr) qc -> qc q qn+qr"),
        layers="compressed", **_WHERE,
    ),
    *common.NORMS,
)  # fmt: skip

_INDEXER = rules(
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
    *common.mlp(f"{_BLOCK}.shared_experts", "mlp.shared_experts", "sn*m"),
)

_BIAS = Rule(
    f"{_BLOCK}.MoeBlock_0.gate.bias", "mlp.gate.e_score_correction_bias", "x -> x",
    dtype="float32", collection="MoEBiasVar", scan_axis=0,
)  # fmt: skip


_WORDS = sizes.words(
    {word: key for word, key in sizes.EXPERT_WORDS.items() if word != "head_dim"},
    "q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim",
    base_mlp_dim="intermediate_size", first_num_dense_layers="first_k_dense_replace", shared_experts="n_shared_experts",
)  # fmt: skip


def _family(name: str, version: str, *rules: Rule, bias: tuple[Rule, ...] = (_BIAS,), query_rank: int = 1536) -> Family:
    shared = (*_ATTENTION, *rules)
    experts = (*shared, *_EXPERTS, *bias)
    first = "first_k_dense_replace"
    return common.family(
        name, "deepseek", f"DeepseekV{version}ForCausalLM", f"deepseek_v{version}", (), words=_WORDS,
        stacks=(
            Stack("decoder.dense_layers", "model.layers.", (*shared, *common.mlp()), end=first, kinds=_kinds),
            Stack("decoder.moe_layers", "model.layers.", experts, first=first, restart=True, kinds=_kinds),
        ),
        # The queries' rank is null in V2-Lite, which does not compress them.
        defaults={
            "num_key_value_heads": sizes.query_heads, "num_experts": sizes.expert_count, "q_lora_rank": query_rank,
            first: 0,
        },
        extra_layers="num_nextn_predict_layers",
    )  # fmt: skip


DEEPSEEK2 = _family("deepseek2", "2", bias=(), query_rank=0)
DEEPSEEK3 = _family("deepseek3", "3")
DEEPSEEK32 = _family("deepseek3.2", "32", *_INDEXER)
