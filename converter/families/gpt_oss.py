"""gpt-oss. Layers alternate between sliding and full attention; MaxText scans them in pairs.

Gate and up projection are interleaved: even rows or columns are the gate's. bfloat16 repositories have experts as
[in, out]; OpenAI's own have MXFP4 blocks as [out, in].
"""

from __future__ import annotations

from converter.families.common import (
    DECODER,
    EXPERT_DIMS,
    EXPERT_WORDS,
    NORMS,
    attention,
    expert_count,
    expert_geometry,
)
from converter.rules import Family, Form, Model, Rule, Slot, Stack

_GATE_UP = "mlp.experts.gate_up_proj"
_DOWN = "mlp.experts.down_proj"


def _half(target: str, which: str) -> tuple[Rule, Rule]:
    blocks = Form(f"{_GATE_UP}_blocks", f"x (m {which}) e -> x e m")
    return (
        Rule(f"GptOssMlp.{target}", _GATE_UP, f"x e (m {which}) -> x e m", forms=(blocks,)),
        Rule(f"GptOssMlp.{target}_bias", f"{_GATE_UP}_bias", f"x (m {which}) -> x m"),
    )


_LAYER = (
    *attention("GptOssAttention"),
    Rule("GptOssAttention.query.bias", "self_attn.q_proj.bias", "(q d) -> q d"),
    Rule("GptOssAttention.key.bias", "self_attn.k_proj.bias", "(k d) -> k d"),
    Rule("GptOssAttention.value.bias", "self_attn.v_proj.bias", "(k d) -> k d"),
    Rule("GptOssAttention.out.bias", "self_attn.o_proj.bias", "e -> e"),
    Rule("GptOssAttention.sinks", "self_attn.sinks", "q -> q"),
    Rule("GptOssMlp.gate.kernel", "mlp.router.weight", "x e -> e x"),
    Rule("GptOssMlp.gate.bias", "mlp.router.bias", "x -> x"),
    *_half("wi_0", "0/2"),
    *_half("wi_1", "1/2"),
    Rule("GptOssMlp.wo", _DOWN, "x m e -> x m e", forms=(Form(f"{_DOWN}_blocks", "x e m -> x m e"),)),
    Rule("GptOssMlp.wo_bias", f"{_DOWN}_bias", "x e -> x e"),
    *NORMS,
)

_20B = expert_geometry(2880, 2880, 24, 64, 8, 32, per_token=4, vocab=201088, head_dim=64)
_120B = expert_geometry(2880, 2880, 36, 64, 8, 128, per_token=4, vocab=201088, head_dim=64)

GPT_OSS = Family(
    name="gpt-oss",
    decoder_block="gpt_oss",
    architectures=("GptOssForCausalLM",),
    model_types=("gpt_oss",),
    defaults={
        "head_dim": 64,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
        "num_experts": expert_count,
        "moe_intermediate_size": lambda c: c["intermediate_size"],
    },
    dims=EXPERT_DIMS,
    rules=DECODER,
    stacks=(Stack("decoder.layers", "model.layers.", _LAYER, slots=(Slot("layers_0"), Slot("layers_1"))),),
    words=EXPERT_WORDS,
    models={
        "gpt-oss-20b": Model("unsloth/gpt-oss-20b-BF16", _20B, "converter"),
        "gpt-oss-120b": Model("unsloth/gpt-oss-120b-BF16", _120B, "converter"),
    },
)
