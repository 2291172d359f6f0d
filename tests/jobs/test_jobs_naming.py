"""Names: stable, valid, apart."""

from __future__ import annotations

import datetime
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.catalogue import catalogue
from jobs.errors import RequestError
from jobs.naming import check_image, check_run_name, job_name, new_run_name

LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"  # RFC 1123
RUNS = st.from_regex(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?", fullmatch=True)


@given(st.sampled_from(sorted(catalogue())), RUNS)
def test_a_jobs_name_is_a_label_and_always_the_same(model: str, run: str) -> None:
    name = job_name(model, check_run_name(run))
    assert re.fullmatch(LABEL, name)
    assert len(name) <= 63
    assert name == job_name(model, run)


def test_long_names_that_begin_alike_stay_apart() -> None:
    runs = [f"{'x' * 60}{end}" for end in "abc"]
    assert len({job_name("llama3.1-70b-Instruct", run) for run in runs}) == 3


def test_a_new_run_is_named_after_its_time() -> None:
    assert new_run_name(datetime.datetime(2026, 8, 13, 12, 30, 8)) == "conv-20260813T123008"
    check_run_name(new_run_name())


@pytest.mark.parametrize("run", ["", "-a", "a-", "a/b", "a b", "ä", "a" * 64, "a\n", ".a", "a:b", "$(x)"])
def test_a_run_that_makes_a_bad_label_is_refused(run: str) -> None:
    with pytest.raises(RequestError, match="--run-name"):
        check_run_name(run)


@pytest.mark.parametrize(
    "image",
    ["x/converter", "converter", "localhost:5000/converter", "us-docker.pkg.dev/p/r/c"],
)
def test_an_image_needs_a_tag(image: str) -> None:
    with pytest.raises(RequestError, match="has no tag"):
        check_image(image)


@pytest.mark.parametrize("image", ["", "X/y:1", "a b:1", "x:1:2", "https://x/y:1", "x@sha256:12", "x:", "-x:1"])
def test_what_is_no_image(image: str) -> None:
    with pytest.raises(RequestError, match="not an image's name"):
        check_image(image)


def test_a_tag_without_digest_is_a_warning() -> None:
    assert len(check_image("localhost:5000/a/converter:1.2")) == 1
    assert not check_image(f"a/converter:1.2@sha256:{'0' * 64}")
    assert not check_image(f"a/converter@sha256:{'a' * 64}")
