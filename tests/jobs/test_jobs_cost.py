"""The cost command against arithmetic done here, from list prices."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import pytest
from commands import Command

from jobs.cost import node_price, prices, tpu_price

# Compute Engine and Cloud TPU list prices of us-central1: N2 0.031611 a vCPU-hour and 0.004237 a GiB-hour, 1,000 GB of
# pd-balanced at 0.10 a month; v5p 4.20 a chip-hour.
NODE = 64 * 0.031611 + 512 * 0.004237 + 100 / 730
SLICE = 4 * 4.20


def test_prices_are_the_list_prices() -> None:
    assert node_price("n2-highmem-64") == pytest.approx(NODE)
    assert pytest.approx(4.33, abs=0.005) == NODE
    assert tpu_price() == pytest.approx(SLICE) == pytest.approx(16.80)


def test_prices_are_dated_and_each_has_a_source() -> None:
    assert isinstance(prices()["date"], datetime.date)
    text = (Path(__file__).parents[2] / "jobs" / "prices.yaml").read_text()
    for block in ("  n2:", "  c3:", "  disk:", "  minutes_around:", "  v5p:"):
        assert "# Source:" in text[: text.index(block)].rsplit("\n\n", 1)[-1], block


def test_the_same_hours_are_compared_by_default(jobs: Command) -> None:
    ran = jobs("cost", "llama3.1-70b", "qwen3-4b", "--hours", "1.5", "--json")
    first, second, total = json.loads(ran.out)
    # A node is paid for 12 minutes around its Job.
    assert first["node_hours"] == pytest.approx(1.7)
    assert first["dollars"] == pytest.approx(1.7 * NODE)
    assert first["tpu_dollars"] == pytest.approx(1.7 * SLICE)
    assert (first["model"], second["model"], total["model"]) == ("llama3.1-70b", "qwen3-4b", "total")
    assert total["dollars"] == pytest.approx(2 * 1.7 * NODE)
    assert total["saving_percent"] == pytest.approx(100 * (1 - NODE / SLICE))


@pytest.mark.parametrize(
    ("tpu_hours", "holds"),
    # 1 h and 12 minutes of a node against so many of the slice: 85 % is 2.06 of them.
    [("1", False), ("2.0", False), ("2.1", True), ("4", True)],
)
def test_the_claim_is_what_it_is_for_the_given_times(jobs: Command, tpu_hours: str, holds: bool) -> None:
    ran = jobs("cost", "llama3.1-70b", "--hours", "1", "--tpu-hours", tpu_hours)
    saving = 100 * (1 - 1.2 * NODE / (float(tpu_hours) * SLICE))
    assert ('cheaper" holds' in ran.out) is holds
    assert ("does not hold" in ran.out) is not holds
    assert f"{saving:.1f} % cheaper" in ran.out
    assert "given times" in ran.out


def test_estimates_are_called_so(jobs: Command) -> None:
    ran = jobs("cost", "--all")
    assert ran.code == 0
    assert ran.out.count("estimated") > 40
    assert "estimated times" in ran.out


def test_a_dearer_pool_is_called_dearer(jobs: Command) -> None:
    ran = jobs("cost", "llama3.1-70b", "--hours", "5", "--tpu-hours", "1")
    assert "dearer" in ran.out
    assert "does not hold" in ran.out


def test_measured_times_come_from_status(jobs: Command, tmp_path: Path) -> None:
    times = tmp_path / "times.json"
    times.write_text(
        json.dumps(
            [
                {"model": "qwen3-4b", "state": "checked", "elapsed_seconds": 1800},
                {"model": "qwen3-8b", "state": "failed", "elapsed_seconds": 60},
            ]
        )
    )
    four, eight, _ = json.loads(jobs("cost", "qwen3-4b", "qwen3-8b", "--times", str(times), "--json").out)
    assert (four["job_hours"], four["given"]) == (0.5, True)
    assert eight["given"] is False


def test_a_spot_price_is_taken(jobs: Command) -> None:
    first, _ = json.loads(jobs("cost", "qwen3-4b", "--hours", "0.8", "--node-price", "1.5", "--json").out)
    assert first["dollars"] == pytest.approx(1.5)


@pytest.mark.parametrize(
    "words", [("--machine-type", "e2-micro"), ("--times", "/nope"), ("--hours", "0"), ("nonsense",), ("--hours", "x")]
)
def test_bad_words(jobs: Command, words: tuple[str, ...]) -> None:
    ran = jobs("cost", *words)
    assert ran.code == 2
    assert ran.error
