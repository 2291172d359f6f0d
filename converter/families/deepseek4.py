"""DeepSeek V4: compressed attention in two kinds, hyper-connections, and first layers that route by token.

The repositories keep DeepSeek's own names. What is float32 there stays so; the table from tokens to experts holds
integers. MaxText scans pairs of a heavily and a sparsely compressed layer after the first layers.
"""

from __future__ import annotations

from typing import Any

from converter.families.common import EXPERT_DIMS, EXPERT_WORDS, expert_count, expert_geometry, experts, router
from converter.rules import Config, Family, Model, Rule, Slot, Stack

_SPARSE_RATIO = 4


def _ratio(config: Config, layer: int) -> int:
    """How many tokens are compressed into one."""
    if "compress_ratios" in config:
        return int(config["compress_ratios"][layer])
    kind = str(config["layer_types"][layer])
    return int((config.get("compress_rates") or {}).get(kind, 0))


def _sparse(config: Config, layer: int) -> bool:
    return _ratio(config, layer) == _SPARSE_RATIO


def _heavy(config: Config, layer: int) -> bool:
    return _ratio(config, layer) > _SPARSE_RATIO


def _hashed(config: Config, layer: int) -> bool:
    return layer < int(config["num_hash_layers"])


def _routed(config: Config, layer: int) -> bool:
    return not _hashed(config, layer)


def _heavy_ratio(config: Config) -> int:
    ratios = {_ratio(config, layer) for layer in range(int(config["num_hidden_layers"]))}
    return max(ratios)


def _hash_layers(config: Config) -> int:
    return list(config["mlp_layer_types"]).count("hash_moe")


def _exact(target: str, source: str, pattern: str, **more: Any) -> Rule:
    return Rule(target, source, pattern, dtype="float32", **more)


def _hyper(target: str, source: str) -> tuple[Rule, ...]:
    """The three parts of one hyper-connection, which repositories store one after the other."""
    return (
        _exact(f"{target}.mhc_norm.scale", "", "-> he", constant=1.0),
        _exact(f"{target}.pre_alpha", f"{source}_fn", "(<h> | h | hs) he -> he h"),
        _exact(f"{target}.post_alpha", f"{source}_fn", "(h | <h> | hs) he -> he h"),
        _exact(f"{target}.res_alpha", f"{source}_fn", "(h | h | <hs>) he -> he hs"),
        _exact(f"{target}.pre_beta", f"{source}_base", "(<h> | h | h hr) -> h"),
        _exact(f"{target}.post_beta", f"{source}_base", "(h | <h> | h hr) -> h"),
        _exact(f"{target}.res_beta", f"{source}_base", "(h | h | <h hr>) -> h hr"),
        _exact(f"{target}.pre_alpha_scale", f"{source}_scale", "(<1> | 1 | 1) -> 1"),
        _exact(f"{target}.post_alpha_scale", f"{source}_scale", "(1 | <1> | 1) -> 1"),
        _exact(f"{target}.res_alpha_scale", f"{source}_scale", "(1 | 1 | <1>) -> 1"),
    )


def _compressor(target: str, source: str, when: Any, *, ratio: str, size: str, norm: str) -> tuple[Rule, ...]:
    return (
        Rule(f"{target}.gate_proj.kernel", f"{source}.wgate.weight", f"{size} e -> e {size}", layers=when),
        Rule(f"{target}.kv_proj.kernel", f"{source}.wkv.weight", f"{size} e -> e {size}", layers=when),
        Rule(f"{target}.kv_norm.scale", f"{source}.norm.weight", f"{norm} -> {norm}", layers=when),
        _exact(f"{target}.position_bias", f"{source}.ape", f"{ratio} {size} -> {ratio} {size}", layers=when),
    )


_CSA, _HCA = "self_attention.csa_compressor", "self_attention.hca_compressor"
_BLOCK = "mlp.MoeBlock_0"

_LAYER = (
    Rule("pre_self_attention_layer_norm.scale", "attn_norm.weight", "e -> e"),
    Rule("post_self_attention_layer_norm.scale", "ffn_norm.weight", "e -> e"),
    *_hyper("mhc_attention", "hc_attn"),
    *_hyper("mhc_mlp", "hc_ffn"),
    Rule("self_attention.q_norm.scale", "attn.q_norm.weight", "qc -> qc"),
    Rule("self_attention.kv_norm.scale", "attn.kv_norm.weight", "d -> d"),
    Rule("self_attention.wq_a.kernel", "attn.wq_a.weight", "qc e -> e qc"),
    Rule("self_attention.wq_b.kernel", "attn.wq_b.weight", "(q d) qc -> qc q d"),
    Rule("self_attention.wkv.kernel", "attn.wkv.weight", "(k d) e -> e k d"),
    _exact("self_attention.sinks", "attn.attn_sink", "q -> q"),
    Rule("self_attention.o_a_proj.kernel", "attn.wo_a.weight", "(og or) oi -> og oi or"),
    Rule("self_attention.o_b_proj.kernel", "attn.wo_b.weight", "e ogr -> ogr e"),
    *_compressor(_CSA, "attn.compressor", _sparse, ratio="cs", size="dd", norm="d"),
    *_compressor(f"{_CSA}.indexer", "attn.indexer.compressor", _sparse, ratio="cs", size="ii", norm="id"),
    Rule(f"{_CSA}.indexer.weights_proj.kernel", "attn.indexer.weights_proj.weight", "ih e -> e ih", layers=_sparse),
    Rule(f"{_CSA}.indexer.q_proj.kernel", "attn.indexer.wq_b.weight", "ihd qc -> qc ihd", layers=_sparse),
    *_compressor(_HCA, "attn.compressor", _heavy, ratio="ch", size="d", norm="d"),
    router(_BLOCK, "ffn.gate.weight"),
    *experts(_BLOCK, separate="ffn.experts.{x}", names=("w1", "w3", "w2"), fused="ffn.experts"),
    Rule("mlp.shared_experts.wi_0.kernel", "ffn.shared_experts.w1.weight", "sm e -> e sm"),
    Rule("mlp.shared_experts.wi_1.kernel", "ffn.shared_experts.w3.weight", "sm e -> e sm"),
    Rule("mlp.shared_experts.wo.kernel", "ffn.shared_experts.w2.weight", "e sm -> sm e"),
    Rule(
        f"{_BLOCK}.tid2eid",
        "ffn.gate.tid2eid",
        "v xt -> v xt",
        dtype="int32",
        collection="Tid2EidVar",
        layers=_hashed,
    ),
    _exact(f"{_BLOCK}.gate.bias", "ffn.gate.bias", "x -> x", collection="MoEBiasVar", scan_axis=0, layers=_routed),
)

_284B = {
    **expert_geometry(4096, 2048, 43, 64, 1, 256, per_token=6, vocab=129280, head_dim=512),
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "hc_mult": 4,
    "n_shared_experts": 1,
    "num_hash_layers": 3,
    "compress_ratios": [0, 0, *([4, 128] * 20), 4],
}

DEEPSEEK4 = Family(
    name="deepseek4",
    decoder_block="deepseek4",
    architectures=("DeepseekV4ForCausalLM",),
    model_types=("deepseek_v4",),
    defaults={
        "num_key_value_heads": 1,
        "tie_word_embeddings": False,
        "num_experts": expert_count,
        "num_hash_layers": _hash_layers,
        "sparse_ratio": _SPARSE_RATIO,
        "heavy_ratio": _heavy_ratio,
        "hc_hidden_size": lambda c: c["hc_mult"] * c["hidden_size"],
        "hc_square": lambda c: c["hc_mult"] ** 2,
        "o_group_size": lambda c: c["num_attention_heads"] * c["head_dim"] // c["o_groups"],
        "o_rank": lambda c: c["o_groups"] * c["o_lora_rank"],
        "double_head_dim": lambda c: 2 * c["head_dim"],
        "double_index_dim": lambda c: 2 * c["index_head_dim"],
        "index_size": lambda c: c["index_n_heads"] * c["index_head_dim"],
        "shared_intermediate_size": lambda c: c["n_shared_experts"] * c["moe_intermediate_size"],
    },
    dims={
        **EXPERT_DIMS,
        "h": "hc_mult",
        "hr": "hc_mult",
        "hs": "hc_square",
        "he": "hc_hidden_size",
        "qc": "q_lora_rank",
        "og": "o_groups",
        "or": "o_lora_rank",
        "oi": "o_group_size",
        "ogr": "o_rank",
        "cs": "sparse_ratio",
        "ch": "heavy_ratio",
        "dd": "double_head_dim",
        "id": "index_head_dim",
        "ii": "double_index_dim",
        "ih": "index_n_heads",
        "ihd": "index_size",
        "sm": "shared_intermediate_size",
        "xt": "num_experts_per_tok",
    },
    rules=(
        Rule("token_embedder.embedding", "embed.weight", "v e -> v e"),
        Rule("decoder.decoder_norm.scale", "norm.weight", "e -> e"),
        Rule("decoder.logits_dense.kernel", "head.weight", "v e -> e v"),
        _exact("decoder.hc_head.hc_fn", "hc_head_fn", "h he -> he h"),
        _exact("decoder.hc_head.hc_base", "hc_head_base", "h -> h"),
        _exact("decoder.hc_head.hc_scale", "hc_head_scale", "1 -> 1"),
    ),
    stacks=(
        Stack("decoder.layers", "layers.", _LAYER, end="num_hash_layers", scanned=""),
        Stack(
            "decoder.layers",
            "layers.",
            _LAYER,
            first="num_hash_layers",
            scanned="decoder.scanned_blocks",
            slots=(Slot("layers_0"), Slot("layers_1")),
        ),
    ),
    ignored=(r"mtp\..*",),
    words={
        **EXPERT_WORDS,
        "q_lora_rank": "q_lora_rank",
        "o_groups": "o_groups",
        "o_lora_rank": "o_lora_rank",
        "indexer_head_dim": "index_head_dim",
        "indexer_n_heads": "index_n_heads",
        "mhc_expansion_rate": "hc_mult",
        "first_num_hash_layers": "num_hash_layers",
        "shared_experts": "n_shared_experts",
    },
    models={"deepseek4-284b": Model("deepseek-ai/DeepSeek-V4-Flash", _284B, "converter")},
)
