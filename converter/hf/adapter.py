"""A PEFT LoRA adapter, opened: its adapter_config.json and which of its matrices belong together. No data is read.

The folder is what `model.save_pretrained` of a `PeftModel` writes (https://huggingface.co/docs/peft, "PEFT checkpoint
format"): adapter_config.json and adapter_model.safetensors, with `<module>.lora_A.weight` [rank, in] and
`<module>.lora_B.weight` [out, rank] for every adapted linear layer, which then computes with W + scale * B A. The
fields' meaning is that of peft 0.18's LoraConfig; those that would change the result otherwise are refused by name.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from converter.errors import RequestError
from converter.hf.files import CONFIG
from converter.hf.repository import Access, Repository, Source, SourceFiles, locate, open_files, source_file
from converter.hf.safetensors import StoredTensor

log = logging.getLogger("converter")

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"

_PREFIX = "base_model.model."
"""How PEFT's names begin."""

_MATRIX = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])(\.(?P<adapter>[^.]+))?\.weight")

_DTYPES = ("BF16", "F16", "F32")

_REFUSED = {
    "use_dora": "DoRA",
    "modules_to_save": "whole modules beside the adapter",
    "lora_bias": "biases in the adapter",
    "layer_replication": "replicated layers",
    "target_parameters": "adapters of parameters that are no linear layers",
    "trainable_token_indices": "retrained rows of the embedding",
    "alora_invocation_tokens": "an adapter that acts on some tokens only",
    "arrow_config": "routing between adapters",
    "use_qalora": "QALoRA",
    "use_bdlora": "block-diagonal adapters",
}
"""Fields of adapter_config.json that ask for more than W + scale * B A -> what they ask for."""

_KNOWN = frozenset(
    (
        *("peft_type", "peft_version", "task_type", "auto_mapping", "base_model_name_or_path", "revision"),
        *("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "bias", "init_lora_weights"),
        # What follows has done its work in training, or says nothing beyond the tensors' names.
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "inference_mode"),
        *("lora_dropout", "runtime_config", "eva_config", "corda_config", "loftq_config", "lora_ga_config"),
        *("megatron_config", "megatron_core", "qalora_group_size", "ensure_weight_tying"),
        # Without effect on linear layers, in PEFT too.
        "fan_in_fan_out",
    )
)
"""The other fields whose meaning is known; where they matter they are carried out."""

_PLAIN_STARTS = ("gaussian", "orthogonal", "eva", "true", "false")
"""Values of init_lora_weights that leave the base's weights as they are."""


@dataclass(frozen=True)
class Pair:
    """The two matrices of one adapted linear layer.

    Attributes:
      a, b: names of the stored tensors, [rank, inputs] and [outputs, rank].
      scale: of their product.
    """

    a: str
    b: str
    rank: int
    inputs: int
    outputs: int
    scale: float


@dataclass(frozen=True)
class Adapter:
    """An opened adapter.

    Attributes:
      repository: its files, config and tensors; PEFT's prefix and the adapter's own name are taken off the names.
      pairs: by the name of the adapted module.
      alpha: as adapter_config.json has it.
    """

    repository: Repository
    pairs: Mapping[str, Pair]
    alpha: float

    @property
    def base(self) -> str | None:
        """The model it was trained on, as adapter_config.json has it."""
        name = self.repository.config.get("base_model_name_or_path")
        return name if isinstance(name, str) else None


def locate_adapter(location: str, *, revision: str | None, access: Access) -> Source:
    """Find an adapter: a folder, hub id or folder of a bucket, without reading or downloading its weights.

    Raises:
      RequestError: there is no such repository.
      WorldError: the network or the server failed.
    """
    try:
        return locate(location, revision=revision, access=access, names=(ADAPTER_CONFIG, ADAPTER_WEIGHTS))
    except RequestError as error:
        raise RequestError(f"hf_lora_adapter_path: {error}") from error


def base_config(location: str, *, revision: str | None, access: Access) -> dict[str, Any]:
    """config.json of a repository, the only file of it that is read."""
    files = open_files(locate(location, revision=revision, access=access, names=(CONFIG,)).fetch())
    if CONFIG not in files.names:
        raise RequestError(f"{location} has no {CONFIG}; is it a model repository?")
    return files.parsed(CONFIG)


def open_adapter(source: Source) -> Adapter:
    """Read the configuration and the header of a fetched adapter.

    Raises:
      RequestError: it is no LoRA adapter that can be carried out exactly, or incomplete.
      WorldError: it cannot be read.
    """
    files, location = open_files(source), source.name
    if ADAPTER_CONFIG not in files.names:
        raise RequestError(f"{location} has no {ADAPTER_CONFIG}; is it a PEFT adapter?")
    config = files.parsed(ADAPTER_CONFIG)
    where = f"{location}/{ADAPTER_CONFIG}"
    _check_config(config, where)
    unknown = sorted(field for field, value in config.items() if value and field not in {*_KNOWN, *_REFUSED})
    if unknown:
        log.warning("%s sets what is not known here and has no effect: %s", where, ", ".join(unknown))
    if ADAPTER_WEIGHTS not in files.names:
        raise RequestError(f"{location} has no {ADAPTER_WEIGHTS}{_pickled(source, files)}")
    size, read = files.weights(ADAPTER_WEIGHTS)
    tensors = _renamed(files.header(ADAPTER_WEIGHTS, size, read), location)
    described = (source_file(source, ADAPTER_WEIGHTS, size),)
    repository = Repository(location, source.revision, config, described, tensors, files.data)
    return Adapter(repository, _pairs(tensors, config, where), float(config["lora_alpha"]))


def _pickled(source: Source, files: SourceFiles) -> str:
    names = source.server.files if source.server else files.names
    if any(Path(name).suffix in (".bin", ".pt", ".pth") for name in names):
        return ", only PyTorch pickles, which are never opened: save it as safetensors first (peft: save_pretrained)"
    return "; is it a PEFT adapter?"


def _check_config(config: Mapping[str, Any], where: str) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise RequestError(f"{where} has peft_type {kind!r}; only LORA adapters can be converted")
    for field, what in _REFUSED.items():
        if config.get(field):
            raise RequestError(f"{where} sets {field}: {what} cannot be converted; merge it with peft first")
    if config.get("bias", "none") != "none":
        raise RequestError(f"{where} has bias={config['bias']!r}: trained biases cannot be converted")
    start = str(config.get("init_lora_weights", True)).lower()
    if start not in _PLAIN_STARTS:
        raise RequestError(
            f"{where} has init_lora_weights={start!r}, which may have changed the base's own weights; "
            "save it as a plain LoRA adapter (peft: path_initial_model_for_weight_conversion)"
        )
    for name, value in (("r", config.get("r")), *_pattern(config, "rank_pattern", where)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise RequestError(f"{where} gives no usable rank {name}: {value!r}")
    for name, value in (("lora_alpha", config.get("lora_alpha")), *_pattern(config, "alpha_pattern", where)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise RequestError(f"{where} gives no usable alpha {name}: {value!r}")


def _pattern(config: Mapping[str, Any], field: str, where: str) -> list[tuple[str, Any]]:
    pattern = config.get(field) or {}
    if not isinstance(pattern, dict):
        raise RequestError(f"{where} has a {field} that is no object")
    for key in pattern:
        try:
            re.compile(key)
        except re.error as error:
            raise RequestError(f"{where} has {key[:100]!r} in {field}, which is no regular expression") from error
    return list(pattern.items())


def _for_module(config: Mapping[str, Any], pattern: str, otherwise: str, module: str) -> Any:
    """A module's rank or alpha: the first entry of the pattern that its name, or an end of it, matches."""
    for key, value in (config.get(pattern) or {}).items():
        if re.match(rf"(.*\.)?({key})$", module):
            return value
    return config[otherwise]


def _renamed(tensors: Mapping[str, StoredTensor], location: str) -> dict[str, StoredTensor]:
    """The matrices of the adapter under `<module>.lora_A.weight` and `<module>.lora_B.weight`."""
    found: dict[str, StoredTensor] = {}
    adapters = set()
    for name, tensor in tensors.items():
        match = _MATRIX.fullmatch(name.removeprefix(_PREFIX))
        if match is None:
            raise RequestError(f"{location} has tensor {name[:200]}: {_meaning(name)} cannot be converted")
        adapters.add(match["adapter"] or "default")
        plain = f"{match['module']}.lora_{match['side']}.weight"
        if plain in found or len(adapters) > 1:
            raise RequestError(f"{location} holds more than one adapter: {name[:200]}")
        if tensor.dtype not in _DTYPES:
            raise RequestError(f"tensor {name[:200]} has dtype {tensor.dtype}; only {', '.join(_DTYPES)} can be used")
        if len(tensor.shape) != 2:
            raise RequestError(f"tensor {name[:200]} has shape {list(tensor.shape)}; only linear layers can be adapted")
        found[plain] = tensor
    if not found:
        raise RequestError(f"{location}/{ADAPTER_WEIGHTS} holds no adapter")
    return found


def _meaning(name: str) -> str:
    """What a tensor is that is no matrix of a plain adapter."""
    for part, what in (
        ("lora_embedding_", "an adapter of an embedding"),
        ("lora_magnitude_vector", "DoRA's magnitudes"),
        ("modules_to_save", "a module saved whole (modules_to_save)"),
        (".bias", "a trained bias"),
    ):
        if part in name:
            return what
    return "what is no lora_A or lora_B matrix, perhaps of a module saved whole (modules_to_save),"


def _pairs(tensors: Mapping[str, StoredTensor], config: Mapping[str, Any], where: str) -> dict[str, Pair]:
    pairs = {}
    for module in sorted({name.rpartition(".lora_")[0] for name in tensors}):
        a, b = f"{module}.lora_A.weight", f"{module}.lora_B.weight"
        for present, absent in ((a, b), (b, a)):
            if absent not in tensors:
                raise RequestError(f"the adapter has {present[:200]} but no {absent.rpartition(module)[2][1:]} with it")
        (rank, inputs), (outputs, other) = tensors[a].shape, tensors[b].shape
        wanted = _for_module(config, "rank_pattern", "r", module)
        if not rank == other == wanted:
            raise RequestError(
                f"the adapter of {module[:200]} has rank {rank} in lora_A and {other} in lora_B, {where} says {wanted}"
            )
        alpha = _for_module(config, "alpha_pattern", "lora_alpha", module)
        scale = alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank
        pairs[module] = Pair(a, b, rank, inputs, outputs, scale)
    return pairs
