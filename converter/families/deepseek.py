"""DeepSeek V2, V3 and V3.2: latent attention, dense layers first, then layers with routed and shared experts.

The bias that balances V3's routing is a collection of its own in MaxText 0.2.5, its layers first, and stays float32.
Layers that predict further tokens, which come last in V3's repositories, have no place in MaxText's model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from converter.families.common import (
    DECODER,
    EXPERT_DIMS,
    EXPERT_WORDS,
    INV_FREQ,
    NORMS,
    expert_count,
    expert_geometry,
    experts,
    mlp,
    router,
)
from converter.rules import Config, Family, Model, Rule, Stack


def _compressed(config: Config) -> bool:
    return bool(config["q_lora_rank"])


def _plain(config: Config) -> bool:
    return not _compressed(config)


_ATTENTION = (
    Rule("self_attention.kv_norm.scale", "self_attn.kv_a_layernorm.weight", "c -> c"),
    Rule("self_attention.wkv_a.kernel", "self_attn.kv_a_proj_with_mqa.weight", "ca e -> e ca"),
    Rule("self_attention.wkv_b.kernel", "self_attn.kv_b_proj.weight", "(q nv) c -> c q nv"),
    Rule("self_attention.out.kernel", "self_attn.o_proj.weight", "e (q vd) -> q vd e"),
    Rule("self_attention.query.kernel", "self_attn.q_proj.weight", "(q nr) e -> e q nr", when=_plain),
    Rule("self_attention.q_norm.scale", "self_attn.q_a_layernorm.weight", "qc -> qc", when=_compressed),
    Rule("self_attention.wq_a.kernel", "self_attn.q_a_proj.weight", "qc e -> e qc", when=_compressed),
    Rule("self_attention.wq_b.kernel", "self_attn.q_b_proj.weight", "(q nr) qc -> qc q nr", when=_compressed),
    *NORMS,
)

_INDEXER = (
    Rule("self_attention.indexer.k_norm.scale", "self_attn.indexer.k_norm.weight", "id -> id"),
    Rule("self_attention.indexer.k_norm.bias", "self_attn.indexer.k_norm.bias", "id -> id"),
    Rule("self_attention.indexer.weights_proj.kernel", "self_attn.indexer.weights_proj.weight", "ih e -> e ih"),
    Rule("self_attention.indexer.wk.kernel", "self_attn.indexer.wk.weight", "id e -> e id"),
    Rule("self_attention.indexer.wq_b.kernel", "self_attn.indexer.wq_b.weight", "(ih id) qc -> qc ih id"),
)

_BLOCK = "DeepSeekMoeBlock_0"

_EXPERTS = (
    router(f"{_BLOCK}.MoeBlock_0"),
    *experts(f"{_BLOCK}.MoeBlock_0"),
    Rule(f"{_BLOCK}.shared_experts.wi_0.kernel", "mlp.shared_experts.gate_proj.weight", "sm e -> e sm"),
    Rule(f"{_BLOCK}.shared_experts.wi_1.kernel", "mlp.shared_experts.up_proj.weight", "sm e -> e sm"),
    Rule(f"{_BLOCK}.shared_experts.wo.kernel", "mlp.shared_experts.down_proj.weight", "e sm -> sm e"),
)

_BIAS = Rule(
    f"{_BLOCK}.MoeBlock_0.gate.bias",
    "mlp.gate.e_score_correction_bias",
    "x -> x",
    dtype="float32",
    collection="MoEBiasVar",
    scan_axis=0,
)


def _family(
    name: str,
    architecture: str,
    model_type: str,
    models: Mapping[str, Model],
    *,
    attention: tuple[Rule, ...] = (),
    bias: tuple[Rule, ...] = (_BIAS,),
    query_rank: int = 1536,
) -> Family:
    shared = (*_ATTENTION, *attention)
    return Family(
        name=name,
        decoder_block="deepseek",
        architectures=(architecture,),
        model_types=(model_type,),
        defaults={
            "num_key_value_heads": lambda c: c["num_attention_heads"],
            "tie_word_embeddings": False,
            "num_experts": expert_count,
            # Null in V2-Lite, which does not compress its queries.
            "q_lora_rank": query_rank,
            "first_k_dense_replace": 0,
            "qk_head_dims": lambda c: c["qk_nope_head_dim"] + c["qk_rope_head_dim"],
            "kv_head_dims": lambda c: c["qk_nope_head_dim"] + c["v_head_dim"],
            "kv_a_dims": lambda c: c["kv_lora_rank"] + c["qk_rope_head_dim"],
            "shared_intermediate_size": lambda c: c["n_shared_experts"] * c["moe_intermediate_size"],
        },
        dims={
            **EXPERT_DIMS,
            "c": "kv_lora_rank",
            "ca": "kv_a_dims",
            "qc": "q_lora_rank",
            "nr": "qk_head_dims",
            "nv": "kv_head_dims",
            "vd": "v_head_dim",
            "sm": "shared_intermediate_size",
            "ih": "index_n_heads",
            "id": "index_head_dim",
        },
        rules=DECODER,
        stacks=(
            Stack("decoder.dense_layers", "model.layers.", (*shared, *mlp()), end="first_k_dense_replace"),
            Stack(
                "decoder.moe_layers",
                "model.layers.",
                (*shared, *_EXPERTS, *bias),
                first="first_k_dense_replace",
                restart=True,
            ),
        ),
        ignored=(INV_FREQ,),
        extra_layers="num_nextn_predict_layers",
        words={
            **{word: key for word, key in EXPERT_WORDS.items() if word != "head_dim"},
            "base_mlp_dim": "intermediate_size",
            "first_num_dense_layers": "first_k_dense_replace",
            "q_lora_rank": "q_lora_rank",
            "kv_lora_rank": "kv_lora_rank",
            "qk_nope_head_dim": "qk_nope_head_dim",
            "qk_rope_head_dim": "qk_rope_head_dim",
            "v_head_dim": "v_head_dim",
            "shared_experts": "n_shared_experts",
        },
        models=models,
    )


def _size(
    hidden: int,
    mlp_size: int,
    expert_size: int,
    layers: int,
    heads: int,
    count: int,
    *,
    vocab: int,
    per_token: int = 8,
    query_rank: int = 1536,
    dense: int = 1,
    shared: int = 1,
) -> dict[str, Any]:
    return {
        **expert_geometry(hidden, expert_size, layers, heads, heads, count, per_token=per_token, vocab=vocab),
        "intermediate_size": mlp_size,
        "q_lora_rank": query_rank,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "first_k_dense_replace": dense,
        "n_shared_experts": shared,
    }


_16B = _size(2048, 10944, 1408, 27, 16, 64, vocab=102400, per_token=6, query_rank=0, shared=2)
_236B = _size(5120, 12288, 1536, 60, 128, 160, vocab=102400, per_token=6, shared=2)
_671B = _size(7168, 18432, 2048, 61, 128, 256, vocab=129280, dense=3)
_1T = _size(7168, 18432, 2048, 61, 64, 384, vocab=163840)

DEEPSEEK2 = _family(
    "deepseek2",
    "DeepseekV2ForCausalLM",
    "deepseek_v2",
    {
        "deepseek2-16b": Model("deepseek-ai/DeepSeek-V2-Lite", _16B, "converter"),
        "deepseek2-236b": Model("deepseek-ai/DeepSeek-V2", _236B, "model"),
    },
    bias=(),
    query_rank=0,
)

DEEPSEEK3 = _family(
    "deepseek3",
    "DeepseekV3ForCausalLM",
    "deepseek_v3",
    {
        "deepseek3-671b": Model("deepseek-ai/DeepSeek-V3", _671B, "converter"),
        "deepseek-r1-671b": Model("deepseek-ai/DeepSeek-R1", _671B),
        "kimi-k2-1t": Model("moonshotai/Kimi-K2-Instruct", _1T, "model"),
    },
)

DEEPSEEK32 = _family(
    "deepseek3.2",
    "DeepseekV32ForCausalLM",
    "deepseek_v32",
    {
        "deepseek3.2-671b": Model(
            "deepseek-ai/DeepSeek-V3.2", {**_671B, "index_n_heads": 64, "index_head_dim": 128}, "converter"
        ),
    },
    attention=_INDEXER,
)
