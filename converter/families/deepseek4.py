"""DeepSeek V4: compressed attention in two kinds, hyper-connections, and first layers that route by token.

The repositories keep DeepSeek's own names. What is float32 there stays so; the table from tokens to experts holds
integers. MaxText scans pairs of a heavily and a sparsely compressed layer after the first layers.
"""

from dataclasses import replace
from typing import Any

from converter import sizes
from converter.families import common
from converter.rules import Config, Rule, Stack, rules, slots

_SPARSE_RATIO = 4


def _ratio(config: Config, layer: int) -> int:
    """How many tokens are compressed into one."""
    if "compress_ratios" in config:
        return int(config["compress_ratios"][layer])
    return int((config.get("compress_rates") or {}).get(config["layer_types"][layer], 0))


def _kinds(config: Config, layer: int) -> set[str]:
    """Hashed: tokens themselves choose experts; sparse and heavy: the two kinds of compressed attention."""
    ratio, hashed = _ratio(config, layer), layer < int(config["num_hash_layers"])
    tests = {"hashed": hashed, "sparse": ratio == _SPARSE_RATIO, "heavy": ratio > _SPARSE_RATIO}
    return {kind for kind, holds in tests.items() if holds}


def _exact(*table: tuple[str, str, str], **options: Any) -> tuple[Rule, ...]:
    return rules(*table, dtype="float32", **options)


def _hyper(target: str, source: str) -> tuple[Rule, ...]:
    """The three parts of one hyper-connection, which repositories store one after the other."""
    return (
        *_exact((f"{target}.mhc_norm.scale", "", "-> h*e"), constant=1.0),
        *_exact(
            ("pre_alpha", "fn", "(<h> | h | h*h) h*e -> h*e h"),
            ("post_alpha", "fn", "(h | <h> | h*h) h*e -> h*e h"),
            ("res_alpha", "fn", "(h | h | <h*h>) h*e -> h*e h*h"),
            ("pre_beta", "base", "(<h> | h | h hr) -> h"),
            ("post_beta", "base", "(h | <h> | h hr) -> h"),
            ("res_beta", "base", "(h | h | <h hr>) -> h hr"),
            ("pre_alpha_scale", "scale", "(<1> | 1 | 1) -> 1"),
            ("post_alpha_scale", "scale", "(1 | <1> | 1) -> 1"),
            ("res_alpha_scale", "scale", "(1 | 1 | <1>) -> 1"),
            prefix=f"{target}.", source=f"{source}_",
        ),
    )  # fmt: skip


def _compressor(target: str, source: str, layers: str, ratio: str, size: str, norm: str) -> tuple[Rule, ...]:
    options: dict[str, Any] = {"prefix": f"self_attention.{target}.", "source": f"attn.{source}.", "layers": layers}
    return (
        *rules(
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
    *rules(
        ("pre_self_attention_layer_norm.scale", "attn_norm.weight", "e -> e"),
        ("post_self_attention_layer_norm.scale", "ffn_norm.weight", "e -> e"),
        ("self_attention.q_norm.scale", "attn.q_norm.weight", "qc -> qc"),
        ("self_attention.kv_norm.scale", "attn.kv_norm.weight", "d -> d"),
        ("self_attention.wq_a.kernel", "attn.wq_a.weight", "qc e -> e qc"),
        ("self_attention.wq_b.kernel", "attn.wq_b.weight", "(q d) qc -> qc q d"),
        ("self_attention.wkv.kernel", "attn.wkv.weight", "(k d) e -> e k d"),
        ("self_attention.o_a_proj.kernel", "attn.wo_a.weight", "(og or) q/og*d -> og q/og*d or"),
        ("self_attention.o_b_proj.kernel", "attn.wo_b.weight", "e og*or -> og*or e"),
        ("mlp.shared_experts.wi_0.kernel", "ffn.shared_experts.w1.weight", "sn*m e -> e sn*m"),
        ("mlp.shared_experts.wi_1.kernel", "ffn.shared_experts.w3.weight", "sn*m e -> e sn*m"),
        ("mlp.shared_experts.wo.kernel", "ffn.shared_experts.w2.weight", "e sn*m -> sn*m e"),
    ),
    *_exact(("self_attention.sinks", "attn.attn_sink", "q -> q")),
    *_compressor("csa_compressor", "compressor", "sparse", "cs", "d*2", "d"),
    *_compressor("csa_compressor.indexer", "indexer.compressor", "sparse", "cs", "id*2", "id"),
    *_compressor("hca_compressor", "compressor", "heavy", "ch", "d", "d"),
    *rules(
        (f"{_INDEXER}.weights_proj.kernel", "attn.indexer.weights_proj.weight", "ih e -> e ih"),
        (f"{_INDEXER}.q_proj.kernel", "attn.indexer.wq_b.weight", "ih*id qc -> qc ih*id"),
        layers="sparse",
    ),
    common.router(_BLOCK, "ffn.gate.weight"),
    *common.experts(_BLOCK, separate="ffn.experts.{x}", names=("w1", "w3", "w2"), fused="ffn.experts"),
    Rule(
        f"{_BLOCK}.tid2eid", "ffn.gate.tid2eid", "v xt -> v xt", dtype="int32", collection="Tid2EidVar", layers="hashed"
    ),
    *_exact((f"{_BLOCK}.gate.bias", "ffn.gate.bias", "x -> x"), collection="MoEBiasVar", scan_axis=0, layers="!hashed"),
)

_SLOTS = slots("layers", 2)
_FIRST = Stack("decoder.layers", "layers.", _LAYER, end="num_hash_layers", scanned="", kinds=_kinds)
_OTHERS = replace(_FIRST, end=None, first="num_hash_layers", scanned="decoder.scanned_blocks", slots=_SLOTS)

DEEPSEEK4 = common.family(
    "deepseek4", "deepseek4", "DeepseekV4ForCausalLM", "deepseek_v4", (),
    defaults={
        "num_key_value_heads": 1, "num_experts": sizes.expert_count, "sparse_ratio": _SPARSE_RATIO,
        "num_hash_layers": lambda c: list(c["mlp_layer_types"]).count("hash_moe"),
        "heavy_ratio": lambda c: max(_ratio(c, layer) for layer in range(c["num_hidden_layers"])),
    },
    rules=(
        *rules(
            ("token_embedder.embedding", "embed.weight", "v e -> v e"),
            ("decoder.decoder_norm.scale", "norm.weight", "e -> e"),
            ("decoder.logits_dense.kernel", "head.weight", "v e -> e v"),
        ),
        *_exact(
            ("decoder.hc_head.hc_fn", "hc_head_fn", "h h*e -> h*e h"),
            ("decoder.hc_head.hc_base", "hc_head_base", "h -> h"),
            ("decoder.hc_head.hc_scale", "hc_head_scale", "1 -> 1"),
        ),
    ),
    stacks=(_FIRST, _OTHERS),
    ignored=(r"mtp\..*",),
    words=sizes.words(
        sizes.EXPERT_WORDS, "q_lora_rank o_groups o_lora_rank", indexer_head_dim="index_head_dim",
        indexer_n_heads="index_n_heads", mhc_expansion_rate="hc_mult", first_num_hash_layers="num_hash_layers",
        shared_experts="n_shared_experts",
    ),
)  # fmt: skip
