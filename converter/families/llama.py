"""Llama 2 to 3.3 and Mistral 7B: one architecture, two layouts of the rotary embedding.

MaxText's attention multiplies the query by nothing, so 1/sqrt(head_dim) goes into its kernel; its Llama 3.1 rotary
embedding rotates neighbouring pairs, every other one rotates halves, as the repositories do (MaxText 0.2.5
layers/attentions.py and layers/embeddings.py).
"""

from __future__ import annotations

from collections.abc import Mapping

from converter.families.common import DECODER, DENSE_WORDS, DIMS, INV_FREQ, NORMS, TIED, attention, geometry, mlp
from converter.rules import Config, Family, HalvesToPairs, Model, Op, Scale, Stack


def query_scale(config: Config) -> float:
    return float(config["head_dim"] ** -0.5)


def _family(
    name: str,
    *,
    decoder_block: str,
    architecture: str,
    model_type: str,
    models: Mapping[str, Model],
    rotary: tuple[Op, ...] = (),
    rope_type: str = "default",
    key_value_heads: int | None = None,
) -> Family:
    return Family(
        name=name,
        decoder_block=decoder_block,
        architectures=(architecture,),
        model_types=(model_type,),
        defaults={
            "head_dim": lambda c: c["hidden_size"] // c["num_attention_heads"],
            "num_key_value_heads": key_value_heads or (lambda c: c["num_attention_heads"]),
            "tie_word_embeddings": False,
        },
        dims=DIMS,
        rules=DECODER,
        stacks=(
            Stack(
                "decoder.layers",
                "model.layers.",
                (*attention(query=(*rotary, Scale(query_scale)), key=rotary), *mlp(), *NORMS),
            ),
        ),
        ignored=(INV_FREQ,),
        equal=TIED,
        rope_type=rope_type,
        words=DENSE_WORDS,
        models=models,
    )


_8B = geometry(4096, 14336, 32, 32, 8, vocab=128256)
_70B = geometry(8192, 28672, 80, 64, 8, vocab=128256)
_405B = geometry(16384, 53248, 126, 128, 8, vocab=128256)
_1B = geometry(2048, 8192, 16, 32, 8, vocab=128256, tied=True)
_3B = geometry(3072, 8192, 28, 24, 8, vocab=128256, tied=True)
_NEEDS_ROPE_TYPE = "MaxText needs rope_type=llama3.1 to run it"

LLAMA2 = _family(
    "llama2",
    decoder_block="llama2",
    architecture="LlamaForCausalLM",
    model_type="llama",
    models={
        "llama2-7b": Model("meta-llama/Llama-2-7b-hf", geometry(4096, 11008, 32, 32, 32, vocab=32000), "model"),
        "llama2-13b": Model("meta-llama/Llama-2-13b-hf", geometry(5120, 13824, 40, 40, 40, vocab=32000), "model"),
        "llama2-70b": Model("meta-llama/Llama-2-70b-hf", geometry(8192, 28672, 80, 64, 8, vocab=32000), "model"),
        "llama3-8b": Model("meta-llama/Meta-Llama-3-8B", _8B, "model"),
        "llama3-8b-Instruct": Model("meta-llama/Meta-Llama-3-8B-Instruct", _8B),
        "llama3-70b": Model("meta-llama/Meta-Llama-3-70B", _70B, "model"),
        "llama3-70b-Instruct": Model("meta-llama/Meta-Llama-3-70B-Instruct", _70B),
    },
)

LLAMA31 = _family(
    "llama3.1",
    decoder_block="llama2",
    architecture="LlamaForCausalLM",
    model_type="llama",
    rotary=(HalvesToPairs("d"),),
    rope_type="llama3.1",
    models={
        "llama3.1-8b": Model("meta-llama/Llama-3.1-8B", _8B, "converter"),
        "llama3.1-8b-Instruct": Model("meta-llama/Llama-3.1-8B-Instruct", _8B, "converter"),
        "llama3.1-70b": Model("meta-llama/Llama-3.1-70B", _70B, "converter"),
        "llama3.1-70b-Instruct": Model("meta-llama/Llama-3.1-70B-Instruct", _70B, "converter"),
        "llama3.1-405b": Model("meta-llama/Llama-3.1-405B", _405B, "converter"),
        "llama3.1-405b-Instruct": Model("meta-llama/Llama-3.1-405B-Instruct", _405B),
        "llama3.2-1b": Model("meta-llama/Llama-3.2-1B", _1B, note=_NEEDS_ROPE_TYPE),
        "llama3.2-1b-Instruct": Model("meta-llama/Llama-3.2-1B-Instruct", _1B, note=_NEEDS_ROPE_TYPE),
        "llama3.2-3b": Model("meta-llama/Llama-3.2-3B", _3B, note=_NEEDS_ROPE_TYPE),
        "llama3.2-3b-Instruct": Model("meta-llama/Llama-3.2-3B-Instruct", _3B, note=_NEEDS_ROPE_TYPE),
        "llama3.3-70b": Model("meta-llama/Llama-3.3-70B-Instruct", _70B, "model", _NEEDS_ROPE_TYPE),
        "llama3.3-70b-Instruct": Model("meta-llama/Llama-3.3-70B-Instruct", _70B, note=_NEEDS_ROPE_TYPE),
    },
)

MISTRAL = _family(
    "mistral",
    decoder_block="mistral",
    architecture="MistralForCausalLM",
    model_type="mistral",
    key_value_heads=8,
    models={
        "mistral-7b": Model("mistralai/Mistral-7B-v0.1", geometry(4096, 14336, 32, 32, 8, vocab=32000), "model"),
    },
)
