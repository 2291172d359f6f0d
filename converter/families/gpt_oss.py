"""gpt-oss. Layers alternate between sliding and full attention; MaxText scans them in pairs.

Gate and up projection are interleaved: even rows or columns are the gate's. bfloat16 repositories have experts as
[in, out]; OpenAI's own have MXFP4 blocks as [out, in].
"""

from converter import sizes
from converter.families import common
from converter.rules import Form, Rule, rules, slots

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
    *rules(
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

GPT_OSS = common.family(
    "gpt-oss", "gpt_oss", "GptOssForCausalLM", "gpt_oss", _LAYER,
    slots=slots("layers", 2), words=sizes.EXPERT_WORDS,
    defaults={
        "head_dim": 64, "num_key_value_heads": 8, "num_experts": sizes.expert_count,
        "moe_intermediate_size": lambda c: c["intermediate_size"],
    },
)  # fmt: skip
