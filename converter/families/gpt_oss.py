"""gpt-oss. Layers alternate between sliding and full attention; MaxText scans them in pairs.

Gate and up projection are interleaved: even rows or columns are the gate's. bfloat16 repositories have experts as
[in, out]; OpenAI's own have MXFP4 blocks as [out, in].
"""

from __future__ import annotations

from converter.families import common
from converter.rules import Family, Form, Rule, Slot, Stack

_GATE_UP, _DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"


def _half(target: str, which: str) -> tuple[Rule, Rule]:
    blocks = Form(f"{_GATE_UP}_blocks", f"x (m {which}) e -> x e m")
    return (
        Rule(f"GptOssMlp.{target}", _GATE_UP, f"x e (m {which}) -> x e m", forms=(blocks,)),
        Rule(f"GptOssMlp.{target}_bias", f"{_GATE_UP}_bias", f"x (m {which}) -> x m"),
    )


_LAYER = (
    *common.attention("GptOssAttention"),
    *common.biases("GptOssAttention"),
    *common.rules(
        ("GptOssAttention.out.bias", "self_attn.o_proj.bias", "e -> e"),
        ("GptOssAttention.sinks", "self_attn.sinks", "q -> q"),
        ("GptOssMlp.gate.kernel", "mlp.router.weight", "x e -> e x"),
        ("GptOssMlp.gate.bias", "mlp.router.bias", "x -> x"),
        ("GptOssMlp.wo_bias", f"{_DOWN}_bias", "x e -> x e"),
    ),
    *_half("wi_0", "0/2"),
    *_half("wi_1", "1/2"),
    Rule("GptOssMlp.wo", _DOWN, "x m e -> x m e", forms=(Form(f"{_DOWN}_blocks", "x e m -> x m e"),)),
    *common.NORMS,
)

GPT_OSS = Family(
    name="gpt-oss",
    decoder_block="gpt_oss",
    architectures=("GptOssForCausalLM",),
    model_types=("gpt_oss",),
    defaults={
        "head_dim": 64,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
        "num_experts": common.expert_count,
        "moe_intermediate_size": lambda c: c["intermediate_size"],
    },
    dims=common.EXPERT_DIMS,
    rules=common.DECODER,
    stacks=(Stack("decoder.layers", "model.layers.", _LAYER, slots=(Slot("layers_0"), Slot("layers_1"))),),
    words=common.EXPERT_WORDS,
)
