"""A run that is ended in the middle leaves nothing that a loader takes for a checkpoint, and the next run succeeds."""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as ocp_v1
import pytest
from checkpoints import CONFIGS, Config, random_tensors, write_folder
from reading import digests
from running import Run, convert, files_below, start_to_maxtext, to_maxtext

MODEL = "qwen3-8b"
CONFIG: Config = {
    **CONFIGS[MODEL],
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 16384,
}

Digests = dict[str, str]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 130 MB."""
    return write_folder(tmp_path_factory.mktemp("source") / "hf", CONFIG, random_tensors(CONFIG))


@pytest.fixture(scope="module")
def expected(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Digests:
    """What a conversion that nobody disturbs gives."""
    return digests(convert(MODEL, source, tmp_path_factory.mktemp("expected") / "out"))


def start(source: Path, output: Path, *words: object) -> subprocess.Popen[str]:
    """Start a conversion with many small groups, so that there is a middle to hit."""
    return start_to_maxtext(
        f"model_name={MODEL}",
        f"base_output_directory={output}",
        f"--hf_model_path={source}",
        "--memory_budget=2MB",
        "--threads=1",
        *words,
    )


def size_below(folder: Path) -> int:
    """Bytes of files below a folder that may change meanwhile."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(root, name)).st_size  # noqa: PTH116, PTH118
            except FileNotFoundError:
                continue
    return total


def wait_for(process: subprocess.Popen[str], moment: Callable[[], bool]) -> None:
    """Until the moment, or the end of the process if it comes first."""
    deadline = time.monotonic() + 120
    while process.poll() is None and not moment():
        assert time.monotonic() < deadline, "the moment never came"
        time.sleep(0.001)


def partial(output: Path) -> list[Path]:
    """Directories of unfinished checkpoints."""
    return sorted(output.glob("*orbax-checkpoint-tmp*")) if output.is_dir() else []


MOMENTS: dict[str, Callable[[Path], bool]] = {
    "output-made": lambda output: output.is_dir(),
    "step-begun": lambda output: bool(partial(output)),
    "arrays-created": lambda output: size_below(output) > 0,
    "data-begun": lambda output: size_below(output) > 5_000_000,
    "data-half": lambda output: size_below(output) > 50_000_000,
    "data-almost": lambda output: size_below(output) > 85_000_000,
    "metadata": lambda output: any(list(path.rglob("_METADATA")) for path in partial(output)),
    "item-finished": lambda output: any((path / "items").exists() for path in partial(output)),
}


def end(process: subprocess.Popen[str], number: signal.Signals) -> Run:
    """Send a signal and wait."""
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    return Run(process.returncode, out, err)


def check_no_step(output: Path) -> None:
    """Neither plain Orbax nor a person sees a checkpoint."""
    assert not (output / "0").exists()
    if not output.exists():
        return
    before = files_below(output)
    options = ocp.CheckpointManagerOptions(read_only=True)
    with ocp.CheckpointManager(output, item_names=("items",), options=options) as manager:
        assert manager.all_steps() == []
        assert manager.latest_step() is None
    with ocp_v1.training.Checkpointer(output) as checkpointer:
        assert list(checkpointer.checkpoints) == []
        assert checkpointer.latest is None
    for path in (output, *output.iterdir()):
        if path.is_dir() and "orbax-checkpoint-tmp" in path.name:
            assert not ocp_v1.is_orbax_checkpoint(path), path
    assert files_below(output) == before


def check_next_run(source: Path, output: Path, expected: Digests, *words: object) -> None:
    """The next run cleans up and gives the same result."""
    convert(MODEL, source, output, *words)
    assert {path.name for path in output.iterdir()} == {"0"}
    assert digests(output / "0") == expected


def check_terminated(run: Run, message: Path) -> None:
    assert run.code == 143, run.stderr
    assert "Traceback" not in run.stderr
    assert "SIGTERM" in run.stderr.splitlines()[-1]
    content = json.loads(message.read_bytes())
    assert (content["result"], content["exit_code"]) == ("failed", 143)
    assert "SIGTERM" in content["error"]


LATE = ("data-almost", "metadata", "item-finished")
"""Moments after which a run may have ended before the signal reached it."""

SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in MOMENTS if name != "data-half"]


@pytest.mark.parametrize("moment", ["data-half", *SLOW])
def test_sigterm(moment: str, source: Path, expected: Digests, tmp_path: Path) -> None:
    output, message = tmp_path / "new" / "out", tmp_path / "message.json"
    process = start(source, output, f"--termination_message={message}", f"--report={tmp_path / 'report.json'}")
    wait_for(process, lambda: MOMENTS[moment](output))
    run = end(process, signal.SIGTERM)
    if run.code == 0:
        assert moment in LATE, "the signal was lost"
        assert digests(output / "0") == expected
        return
    check_terminated(run, message)
    assert files_below(tmp_path) == {"message.json"}
    check_next_run(source, output, expected)


@pytest.mark.slow
def test_sigterm_twice(source: Path, tmp_path: Path) -> None:
    """An impatient second signal does not interrupt the cleaning up."""
    output, message = tmp_path / "out", tmp_path / "message.json"
    process = start(source, output, f"--termination_message={message}")
    wait_for(process, lambda: MOMENTS["data-half"](output))
    process.send_signal(signal.SIGTERM)
    check_terminated(end(process, signal.SIGTERM), message)
    assert files_below(tmp_path) == {"message.json"}


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.05, 0.2, 0.4, 0.6])
def test_sigterm_while_starting(seconds: float, source: Path, tmp_path: Path) -> None:
    """Before there is a handler the signal itself ends the process, which is the same exit code to a shell."""
    process = start(source, tmp_path / "out")
    time.sleep(seconds)
    run = end(process, signal.SIGTERM)
    assert run.code in (143, -signal.SIGTERM), run.stderr
    assert "Traceback" not in run.stderr
    assert files_below(tmp_path) == set()


@pytest.mark.slow
def test_sigint(source: Path, tmp_path: Path) -> None:
    """Ctrl-C cleans up as well."""
    output = tmp_path / "out"
    process = start(source, output)
    wait_for(process, lambda: MOMENTS["data-half"](output))
    run = end(process, signal.SIGINT)
    assert run.code == 130, run.stderr
    assert "Traceback" not in run.stderr
    assert files_below(tmp_path) == set()


@pytest.mark.parametrize("moment", ["data-half", *SLOW])
def test_sigkill(moment: str, source: Path, expected: Digests, tmp_path: Path) -> None:
    output = tmp_path / "out"
    process = start(source, output)
    wait_for(process, lambda: MOMENTS[moment](output))
    end(process, signal.SIGKILL)
    if (output / "0").exists():
        # It came too late; what is there must then be whole.
        assert digests(output / "0") == expected
        return
    if moment == "data-half":
        assert size_below(output) > 0
    check_no_step(output)
    check_next_run(source, output, expected)


@pytest.mark.slow
@pytest.mark.parametrize("word", ["checkpoint_storage_use_ocdbt=false", "checkpoint_storage_use_zarr3=false"])
def test_sigkill_with_other_storage(word: str, source: Path, expected: Digests, tmp_path: Path) -> None:
    output = tmp_path / "out"
    process = start(source, output, word)
    wait_for(process, lambda: MOMENTS["data-half"](output))
    end(process, signal.SIGKILL)
    check_no_step(output)
    check_next_run(source, output, expected, word)


@pytest.mark.slow
def test_killed_again_and_again(source: Path, expected: Digests, tmp_path: Path) -> None:
    output = tmp_path / "out"
    for moment in ("data-begun", "step-begun", "data-half"):
        process = start(source, output)
        wait_for(process, functools.partial(MOMENTS[moment], output))
        end(process, signal.SIGKILL)
        check_no_step(output)
    check_next_run(source, output, expected)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("moment", ["step-begun", "data-half", "data-almost", "item-finished"])
def test_ended_overwrite_keeps_the_old_checkpoint(
    number: signal.Signals, moment: str, source: Path, expected: Digests, tmp_path: Path
) -> None:
    """Until the new one is complete. A reader sees the one or the other, whole."""
    output = tmp_path / "out"
    old = digests(convert(MODEL, source, output, "base_num_decoder_layers=1"))
    size = size_below(output)
    process = start(source, output, "--if_exists=overwrite")
    begun = {
        "step-begun": lambda: bool(partial(output)),
        "data-half": lambda: size_below(output) > size + 50_000_000,
        "data-almost": lambda: size_below(output) > size + 85_000_000,
        "item-finished": lambda: MOMENTS["item-finished"](output),
    }
    wait_for(process, begun[moment])
    run = end(process, number)
    found = digests(output / "0")
    assert found == (expected if run.code == 0 or found != old else old)
    if run.code == 143:
        assert found == old
        assert {path.name for path in output.iterdir()} == {"0"}
    with ocp.CheckpointManager(output, options=ocp.CheckpointManagerOptions(read_only=True)) as manager:
        assert manager.all_steps() == [0]
    check_next_run(source, output, expected, "--if_exists=overwrite")


@pytest.fixture
def half_swapped(source: Path, tmp_path: Path) -> tuple[Path, Digests]:
    """An output as a kill between the two renames of an overwrite leaves it, found by stopping at the second."""
    output = tmp_path / "out"
    old = digests(convert(MODEL, source, output, "base_num_decoder_layers=1"))
    code = """
import os, pathlib, signal, sys
rename = pathlib.Path.rename
count = 0
def stop_at_the_second(path, target):
    global count
    if path.parent == pathlib.Path(sys.argv[1]) and not path.name.endswith('tmp'):
        count += 1
        if count == 2:
            os.kill(os.getpid(), signal.SIGKILL)
    return rename(path, target)
pathlib.Path.rename = stop_at_the_second
from converter.cli import to_maxtext
to_maxtext(sys.argv[2:])
"""
    words = [f"model_name={MODEL}", f"base_output_directory={output}", f"--hf_model_path={source}"]
    from running import environment, sys

    done = subprocess.run(
        [sys.executable, "-c", code, str(output), *words, "--if_exists=overwrite"],
        env=environment(),
        capture_output=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not (output / "0").exists()
    return output, old


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["refuse", "skip", "overwrite"])
def test_kill_between_the_renames_of_an_overwrite(
    mode: str, half_swapped: tuple[Path, Digests], source: Path, expected: Digests
) -> None:
    """The next run, whatever it is asked, finds a whole checkpoint again or makes one; nothing is lost."""
    output, old = half_swapped
    check_no_step(output)
    run = to_maxtext(
        f"model_name={MODEL}", f"base_output_directory={output}", f"--hf_model_path={source}", f"--if_exists={mode}"
    )
    assert run.code in ((0,) if mode == "overwrite" else (0, 2)), run.stderr
    assert "Traceback" not in run.stderr
    assert digests(output / "0") in ([expected] if run.code == 0 else [old, expected])
    if run.code == 0:
        assert {path.name for path in output.iterdir()} == {"0"}


def test_leftovers_of_another_machine_are_cleaned(source: Path, expected: Digests, tmp_path: Path) -> None:
    """Whatever name Orbax gave its temporary directory."""
    output = tmp_path / "out"
    for name in ("0.orbax-checkpoint-tmp", "0.orbax-checkpoint-tmp-123", "0.replacement.orbax-checkpoint-tmp"):
        folder = output / name / "items.orbax-checkpoint-tmp" / "ocdbt.process_0"
        folder.mkdir(parents=True)
        (folder / "manifest.ocdbt").write_bytes(b"x")
    check_no_step(output)
    check_next_run(source, output, expected)


def test_foreign_temporary_directories_stay(source: Path, tmp_path: Path) -> None:
    """Those of other steps may be a training run's."""
    output = tmp_path / "out"
    (output / "10.orbax-checkpoint-tmp").mkdir(parents=True)
    convert(MODEL, source, output, "base_num_decoder_layers=1")
    assert {path.name for path in output.iterdir()} == {"0", "10.orbax-checkpoint-tmp"}
    shutil.rmtree(output)
