"""The command that loads a converted checkpoint in MaxText."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from converter.mapping import Geometry
from converter.maxtext.layout import ITEM, STEP
from converter.request import Request
from converter.rules import Config, Family


def load_command(request: Request, geometry: Geometry) -> str:
    """A training command that starts from the checkpoint; geometry that MaxText would not know is spelled out."""
    step = {"load_parameters_path": str(request.step / ITEM)}
    return _command("pre_train.train maxtext/configs/base.yml", request, geometry, step)


def restore_command(request: Request, geometry: Geometry, rank: int, alpha: float, module_path: str) -> str:
    """A training command that goes on with an adapter that was converted alone."""
    step = {
        "load_parameters_path": f"<a checkpoint of {request.model_name}>/{STEP}/{ITEM}",
        "lora.enable_lora": "true",
        "lora.lora_rank": str(rank),
        "lora.lora_alpha": f"{alpha!r}",
        "lora.lora_module_path": module_path,
        "lora.lora_restore_path": str(request.step / ITEM),
    }
    return _command("post_train.sft.train_sft maxtext/configs/post_train/sft.yml", request, geometry, step)


def _command(trainer: str, request: Request, geometry: Geometry, step: Mapping[str, str]) -> str:
    family, name = request.family, request.model_name
    words = {
        "model_name": name,
        **step,
        "base_output_directory": str(request.output) + "-training",
        "run_name": f"{request.run_name}-training",
        "scan_layers": str(request.scan).lower(),
    }
    if not request.ocdbt:
        words["checkpoint_storage_use_ocdbt"] = "false"
    if not request.zarr3:
        words["checkpoint_storage_use_zarr3"] = "false"
    if request.scan and request.scan_axis != 1:
        words["param_scan_axis"] = str(request.scan_axis)
    if family.rope_type != "default" and not name.startswith(family.rope_type):
        words["rope_type"] = family.rope_type
    actual = _geometry_words(family, geometry.config, geometry.vocab_size, geometry.layers)
    known = {
        known: {word: value for word, value in actual.items() if value != stock[word]}
        for known, model in family.models.items()
        if model.maxtext
        for stock in [_stock_words(family, known)]
    }
    if not known:
        words |= {"model_name": "default", "decoder_block": family.decoder_block, **actual}
    else:
        if name not in known:
            words["model_name"] = min(known, key=lambda candidate: len(known[candidate]))
        if differing := known[words["model_name"]]:
            words |= {"override_model_config": "true", **differing}
    return shlex.join(
        ["python3", "-m", *f"maxtext.trainers.{trainer}".split(), *(f"{word}={value}" for word, value in words.items())]
    )


def _stock_words(family: Family, name: str) -> dict[str, str]:
    """The geometry MaxText has under a name."""
    config = family.fill(family.models[name].config)
    vocabulary = config["vocab_size"]
    layers = int(config[family.stacks[0].layers])
    return _geometry_words(family, config, family.vocabulary.get(vocabulary, vocabulary), layers)


def _geometry_words(family: Family, config: Config, vocab_size: int, layers: int) -> dict[str, str]:
    words = {word: str(config[key]).lower() for word, key in family.words.items()}
    return words | {"vocab_size": str(vocab_size), "base_num_decoder_layers": str(layers // family.merged)}
