"""The catalogue against the converter, the nightly pipeline, and what may not stand in it."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import yaml
from commands import Command

from converter.listing import parameter_count
from converter.models import MODELS
from jobs.catalogue import FOLDER, catalogue, parse
from jobs.errors import RequestError
from jobs.naming import job_name

# The nightly TPU pipeline's models: TaskGroup, variants, dtype of the check, largest KL divergence.
NIGHTLY = {
    "gemma3-4b": ("gemma3-4b", ("unscanned", "scanned", "scanned_multimodal"), "bfloat16", 0.05),
    "gemma4-26b": ("gemma4-26b", ("unscanned", "scanned"), "float32", 0.30),
    "llama3.1-70b": ("llama3_1-70b", ("unscanned", "scanned"), "bfloat16", 0.03),
    "qwen3-30b-a3b-base": ("qwen3-30b", ("unscanned", "scanned"), "float32", 0.03),
    "qwen3-vl-2b": ("qwen3-vl-2b", ("unscanned_multimodal",), "float32", 0.03),
    "gpt-oss-20b": ("gpt-oss-20b", ("unscanned", "scanned"), "float32", 1.0),
}


def _raw() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((FOLDER / "models.yaml").read_text())
    return loaded


def test_every_name_that_the_converter_supports_is_in_it_and_no_other_is_marked_so() -> None:
    assert {model.name for model in catalogue().values() if model.supported} == set(MODELS)


# Published by OpenAI in MXFP4; the converter's own names stand for copies in bfloat16, four times as large.
MXFP4 = {"gpt-oss-20b": "openai/gpt-oss-20b", "gpt-oss-120b": "openai/gpt-oss-120b"}


@pytest.mark.parametrize("name", sorted(MODELS))
def test_repository_and_size_are_the_converters(name: str) -> None:
    model, family = catalogue()[name], MODELS[name]
    assert model.hub == MXFP4.get(name, family.models[name].hub)
    counted = parameter_count(family, name)
    # What the rules of the text model do not read, towers above all, is in the repository too.
    beside = bool(family.tower or family.beside) and not family.models[name].text_only
    assert counted <= model.parameters <= counted * (1.25 if beside else 1)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_what_can_be_is_what_the_converter_says_and_all_of_it_is_written(name: str) -> None:
    model, family = catalogue()[name], MODELS[name]
    assert model.tower == bool(family.tower and not family.models[name].text_only)
    scan = "never" if family.unscannable else "text" if family.tower and family.tower.scans else "always"
    assert model.scan == scan
    if model.nightly:
        return
    assert "unscanned" in model.variants
    assert ("scanned" in model.variants) == (scan != "never")
    assert any(variant.endswith("_multimodal") for variant in model.variants) == model.tower


@pytest.mark.parametrize("name", sorted(MODELS))
def test_time_is_enough_at_a_modest_rate(name: str) -> None:
    model = catalogue()[name]
    checkpoint = model.parameters * 2
    # The source once, every checkpoint once, and one of them again for the check.
    moved = model.source_bytes + (len(model.variants) + 1) * checkpoint
    assert model.time_limit_hours * 3600 * 40e6 >= moved


@pytest.mark.parametrize("name", NIGHTLY)
def test_nightly_settings(name: str) -> None:
    model = catalogue()[name]
    group, variants, dtype, divergence = NIGHTLY[name]
    assert (model.task_group, model.variants) == (group, variants)
    assert (model.check.dtype, model.check.max_kl_div) == (dtype, divergence)
    # Pathways reads these too.
    assert (model.storage.zarr3, model.storage.ocdbt) == (False, False)


def test_the_nightly_models_come_first_and_only_they_are_nightly() -> None:
    assert list(catalogue())[:6] == list(NIGHTLY)
    assert [model.name for model in catalogue().values() if model.nightly] == list(NIGHTLY)


def test_only_gpt_oss_is_checked_against_a_golden_file() -> None:
    golden = {model.name: model.check.golden for model in catalogue().values() if model.check.golden}
    assert golden == {"gpt-oss-20b": "gs://maxtext-test-assets/golden_data_gpt-oss-20b.jsonl"}


def test_names_of_jobs_and_task_groups_keep_models_apart() -> None:
    models = catalogue().values()
    assert len({job_name(model.name, "r1") for model in models}) == len(models)
    assert len({model.task_group for model in models}) == len(models)


def test_a_quantised_source_is_smaller_than_its_parameters_say() -> None:
    model = catalogue()["gpt-oss-20b"]
    assert model.source_bytes == 13_800_000_000 < model.parameters * 2
    assert catalogue()["llama3.1-8b"].source_bytes == 16_060_522_496


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"variants": ["unscaned"]}, "models.gemma3-4b.variants.0"),
        ({"variants": []}, "models.gemma3-4b.variants"),
        ({"tower": False}, "gemma3-4b: variant scanned_multimodal cannot be: there is no vision tower"),
        ({"scan": "text"}, "gemma3-4b: variant scanned_multimodal cannot be: MaxText does not scan layers beside"),
        ({"scan": "never"}, "gemma3-4b: variant scanned cannot be: MaxText does not scan this model's layers"),
        ({"scan": "sometimes"}, "models.gemma3-4b.scan"),
        ({"variants": ["scanned"]}, "check.variant unscanned is not written"),
        ({"priority": "urgent"}, "models.gemma3-4b.priority"),
        ({"storage": {"format": "zarr4", "ocdbt": True}}, "models.gemma3-4b.storage.format"),
        ({"check": {"variant": "unscanned", "dtype": "float32"}}, "'max_kl_div' is a required property"),
        ({"time_limit_hours": 0}, "models.gemma3-4b.time_limit_hours"),
        ({"parameters": "4B"}, "models.gemma3-4b.parameters"),
        ({"hub": "gemma"}, "models.gemma3-4b.hub"),
        ({"tasks": 1}, "tasks"),
        ({"task_group": "gemma.3"}, "models.gemma3-4b.task_group"),
        ({"task_group": "qwen3-30b"}, "qwen3-30b is gemma3-4b's too"),
    ],
)
def test_what_breaks_the_schema_is_refused_by_its_place(change: dict[str, Any], told: str) -> None:
    data = copy.deepcopy(_raw())
    data["models"]["gemma3-4b"] |= change
    with pytest.raises(RequestError) as refused:
        parse(data)
    assert told in str(refused.value)
    assert "\n" not in str(refused.value)


def test_list_shows_every_model(jobs: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    unsupported = replace(catalogue()["gemma3-4b"], supported=False)
    found = {**catalogue(), "gemma3-4b": unsupported}
    monkeypatch.setattr("jobs.cli.catalogue", lambda: found)
    ran = jobs("list")
    assert ran.code == 0
    lines = {line.split()[0]: line for line in ran.out.splitlines()[1:]}
    assert set(lines) == set(catalogue())
    assert "not supported yet" in lines["gemma3-4b"]
    assert "not supported yet" not in lines["llama3.1-70b"]
