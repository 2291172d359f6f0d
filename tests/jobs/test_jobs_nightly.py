"""The nightly models' Jobs, word for word, on small models of their families: equal to MaxText's own conversions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from checkpoints import DATA
from commands import IMAGE, RUN
from reading import array_names, is_ocdbt, stored_array

from converter import cli
from jobs.catalogue import catalogue
from jobs.render import Request, containers, outputs, render
from jobs.settings import Overrides, make

# Model -> what a conversion of the text model, and one with the tower, must equal.
REFERENCES = {
    "gemma3-4b": ("gemma3", "gemma3-mm"),
    "gemma4-26b": ("gemma4-26b", ""),
    "llama3.1-70b": ("llama3.1", ""),
    "qwen3-30b-a3b-base": ("qwen3-moe", ""),
    "qwen3-vl-2b": ("", "qwen3-vl"),
    "gpt-oss-20b": ("gpt-oss", ""),
}


def test_there_is_a_reference_for_each() -> None:
    assert list(REFERENCES) == [model.name for model in catalogue().values() if model.nightly]


@pytest.mark.parametrize("name", REFERENCES)
def test_equals_maxtext(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").mkdir()
    text, multimodal = REFERENCES[name]
    source = DATA / (text or multimodal) / "hf_bf16"
    settings = make(None, Overrides(output_root=str(tmp_path / "out"), output_claim="results"))
    model = catalogue()[name]
    job = render(Request(model, RUN, IMAGE, source=str(source)), settings)
    *conversions, check = containers(job)
    for container, variant in zip(conversions, model.variants, strict=True):
        family = multimodal if variant.endswith("_multimodal") else text
        oracle = json.loads((DATA / family / "oracle.json").read_bytes())
        # MaxText gives some of the small models rows that no tensor has.
        words = [*_words(container.args, tmp_path), f"vocab_size={oracle['words']['vocab_size']}"]
        assert cli.main(words) == 0, capsys.readouterr().err
        step = Path(outputs(job)[variant]) / "0"
        assert not is_ocdbt(step)
        way = "scan" if variant.startswith("scanned") else "unscan"
        expected = json.loads((DATA / family / f"expected_bf16_{way}.json").read_bytes())["arrays"]
        found = {each: stored_array(step, each, "zarr").sha256 for each in array_names(step)}
        assert found == {each: facts["sha256"] for each, facts in expected.items()}, variant
    assert cli.main(_words(check.args, tmp_path)) == 0, capsys.readouterr().err
    assert json.loads((tmp_path / "message").read_bytes())["result"] == "equal"


def _words(args: tuple[str, ...], folder: Path) -> list[str]:
    return [word.replace("/dev/termination-log", str(folder / "message")) for word in args]
