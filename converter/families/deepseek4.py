"""DeepSeek V4: compressed attention in two kinds, hyper-connections, and first layers that route by token.

The repositories keep DeepSeek's own names. What is float32 there stays so; the table from tokens to experts holds
integers. MaxText scans pairs of a heavily and a sparsely compressed layer after the first layers.
"""

from __future__ import annotations

from typing import Any

from converter.families import common
from converter.rules import Config, Family, Rule, Slot, Stack

_SPARSE_RATIO = 4


def _ratio(config: Config, layer: int) -> int:
    """How many tokens are compressed into one."""
    if "compress_ratios" in config:
        return int(config["compress_ratios"][layer])
    return int((config.get("compress_rates") or {}).get(config["layer_types"][layer], 0))


def _sparse(config: Config, layer: int) -> bool:
    return _ratio(config, layer) == _SPARSE_RATIO


def _heavy(config: Config, layer: int) -> bool:
    return _ratio(config, layer) > _SPARSE_RATIO


def _hashed(config: Config, layer: int) -> bool:
    return layer < int(config["num_hash_layers"])


def _routed(config: Config, layer: int) -> bool:
    return not _hashed(config, layer)


def _exact(*table: tuple[str, str, str], **options: Any) -> tuple[Rule, ...]:
    return common.rules(*table, dtype="float32", **options)


def _hyper(target: str, source: str) -> tuple[Rule, ...]:
    """The three parts of one hyper-connection, which repositories store one after the other."""
    return (
        *_exact((f"{target}.mhc_norm.scale", "", "-> he"), constant=1.0),
        *_exact(
            ("pre_alpha", "fn", "(<h> | h | hs) he -> he h"),
            ("post_alpha", "fn", "(h | <h> | hs) he -> he h"),
            ("res_alpha", "fn", "(h | h | <hs>) he -> he hs"),
            ("pre_beta", "base", "(<h> | h | h hr) -> h"),
            ("post_beta", "base", "(h | <h> | h hr) -> h"),
            ("res_beta", "base", "(h | h | <h hr>) -> h hr"),
            ("pre_alpha_scale", "scale", "(<1> | 1 | 1) -> 1"),
            ("post_alpha_scale", "scale", "(1 | <1> | 1) -> 1"),
            ("res_alpha_scale", "scale", "(1 | 1 | <1>) -> 1"),
            prefix=f"{target}.", source=f"{source}_",
        ),
    )  # fmt: skip


def _compressor(target: str, source: str, layers: Any, ratio: str, size: str, norm: str) -> tuple[Rule, ...]:
    options = {"prefix": f"self_attention.{target}.", "source": f"attn.{source}.", "layers": layers}
    return (
        *common.rules(
            ("gate_proj.kernel", "wgate.weight", f"{size} e -> e {size}"),
            ("kv_proj.kernel", "wkv.weight", f"{size} e -> e {size}"),
            ("kv_norm.scale", "norm.weight", f"{norm} -> {norm}"),
            **options,
        ),
        *_exact(("position_bias", "ape", f"{ratio} {size} -> {ratio} {size}"), **options),
    )


_BLOCK, _INDEXER = "mlp.MoeBlock_0", "self_attention.csa_compressor.indexer"

_LAYER = (
    *_hyper("mhc_attention", "hc_attn"),
    *_hyper("mhc_mlp", "hc_ffn"),
    *common.rules(
        ("pre_self_attention_layer_norm.scale", "attn_norm.weight", "e -> e"),
        ("post_self_attention_layer_norm.scale", "ffn_norm.weight", "e -> e"),
        ("self_attention.q_norm.scale", "attn.q_norm.weight", "qc -> qc"),
        ("self_attention.kv_norm.scale", "attn.kv_norm.weight", "d -> d"),
        ("self_attention.wq_a.kernel", "attn.wq_a.weight", "qc e -> e qc"),
        ("self_attention.wq_b.kernel", "attn.wq_b.weight", "(q d) qc -> qc q d"),
        ("self_attention.wkv.kernel", "attn.wkv.weight", "(k d) e -> e k d"),
        ("self_attention.o_a_proj.kernel", "attn.wo_a.weight", "(og or) oi -> og oi or"),
        ("self_attention.o_b_proj.kernel", "attn.wo_b.weight", "e ogr -> ogr e"),
        ("mlp.shared_experts.wi_0.kernel", "ffn.shared_experts.w1.weight", "sm e -> e sm"),
        ("mlp.shared_experts.wi_1.kernel", "ffn.shared_experts.w3.weight", "sm e -> e sm"),
        ("mlp.shared_experts.wo.kernel", "ffn.shared_experts.w2.weight", "e sm -> sm e"),
    ),
    *_exact(("self_attention.sinks", "attn.attn_sink", "q -> q")),
    *_compressor("csa_compressor", "compressor", _sparse, "cs", "dd", "d"),
    *_compressor("csa_compressor.indexer", "indexer.compressor", _sparse, "cs", "ii", "id"),
    *_compressor("hca_compressor", "compressor", _heavy, "ch", "d", "d"),
    *common.rules(
        (f"{_INDEXER}.weights_proj.kernel", "attn.indexer.weights_proj.weight", "ih e -> e ih"),
        (f"{_INDEXER}.q_proj.kernel", "attn.indexer.wq_b.weight", "ihd qc -> qc ihd"),
        layers=_sparse,
    ),
    common.router(_BLOCK, "ffn.gate.weight"),
    *common.experts(_BLOCK, separate="ffn.experts.{x}", names=("w1", "w3", "w2"), fused="ffn.experts"),
    Rule(
        f"{_BLOCK}.tid2eid", "ffn.gate.tid2eid", "v xt -> v xt", dtype="int32", collection="Tid2EidVar", layers=_hashed
    ),
    *_exact((f"{_BLOCK}.gate.bias", "ffn.gate.bias", "x -> x"), collection="MoEBiasVar", scan_axis=0, layers=_routed),
)

_SLOTS = (Slot("layers_0"), Slot("layers_1"))

DEEPSEEK4 = Family(
    name="deepseek4",
    decoder_block="deepseek4",
    architectures=("DeepseekV4ForCausalLM",),
    model_types=("deepseek_v4",),
    defaults={
        "num_key_value_heads": 1, "tie_word_embeddings": False, "num_experts": common.expert_count,
        "num_hash_layers": lambda c: list(c["mlp_layer_types"]).count("hash_moe"),
        "sparse_ratio": _SPARSE_RATIO,
        "heavy_ratio": lambda c: max(_ratio(c, layer) for layer in range(c["num_hidden_layers"])),
        "hc_hidden_size": common.product("hc_mult", "hidden_size"),
        "hc_square": common.product("hc_mult", "hc_mult"),
        "query_size": common.product("num_attention_heads", "head_dim"),
        "o_group_size": common.quotient("query_size", "o_groups"),
        "o_rank": common.product("o_groups", "o_lora_rank"),
        "two": 2, "double_head_dim": common.product("two", "head_dim"),
        "double_index_dim": common.product("two", "index_head_dim"),
        "index_size": common.product("index_n_heads", "index_head_dim"),
        "shared_size": common.product("n_shared_experts", "moe_intermediate_size"),
    },
    dims={
        **common.EXPERT_DIMS, "h": "hc_mult", "hr": "hc_mult", "hs": "hc_square", "he": "hc_hidden_size",
        "qc": "q_lora_rank", "og": "o_groups", "or": "o_lora_rank", "oi": "o_group_size", "ogr": "o_rank",
        "cs": "sparse_ratio", "ch": "heavy_ratio", "dd": "double_head_dim", "id": "index_head_dim",
        "ii": "double_index_dim", "ih": "index_n_heads", "ihd": "index_size", "sm": "shared_size",
        "xt": "num_experts_per_tok",
    },
    rules=(
        *common.rules(
            ("token_embedder.embedding", "embed.weight", "v e -> v e"),
            ("decoder.decoder_norm.scale", "norm.weight", "e -> e"),
            ("decoder.logits_dense.kernel", "head.weight", "v e -> e v"),
        ),
        *_exact(
            ("decoder.hc_head.hc_fn", "hc_head_fn", "h he -> he h"),
            ("decoder.hc_head.hc_base", "hc_head_base", "h -> h"),
            ("decoder.hc_head.hc_scale", "hc_head_scale", "1 -> 1"),
        ),
    ),
    stacks=(
        Stack("decoder.layers", "layers.", _LAYER, end="num_hash_layers", scanned=""),
        Stack(
            "decoder.layers", "layers.", _LAYER,
            first="num_hash_layers", scanned="decoder.scanned_blocks", slots=_SLOTS,
        ),
    ),
    ignored=(r"mtp\..*",),
    words={
        **common.EXPERT_WORDS, "q_lora_rank": "q_lora_rank", "o_groups": "o_groups", "o_lora_rank": "o_lora_rank",
        "indexer_head_dim": "index_head_dim", "indexer_n_heads": "index_n_heads", "mhc_expansion_rate": "hc_mult",
        "first_num_hash_layers": "num_hash_layers", "shared_experts": "n_shared_experts",
    },
)  # fmt: skip
