"""Sources that are read over the network: the hub's and a bucket's byte ranges, a bucket's cache, `hf://` and `gs://`."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import random
import re
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import hub as stand_in
import numpy as np
import pytest
from buckets import Bucket
from checkpoints import BFLOAT16, DATA, write_sparse, write_tiny
from faults import Faults, Proxy
from google_crc32c import value as crc32c
from hub import Hub
from reading import digests
from running import ROOT, Run, convert, environment, files_below, start_to_maxtext, to_maxtext, to_maxtext_process
from test_oracles import CASES, Case

from benchmarks.checkpoints import make_config, tensor_shapes
from converter import fetching, stream
from converter.errors import RequestError
from converter.hf.ahead import Segment
from converter.hf.checksums import Pieces, combined
from converter.hf.location import BucketFolder, Folder, HubModel, name_of, parse_location
from converter.hf.quantised import Weights, open_weights
from converter.hf.repository import Repository, locate, open_repository
from converter.hf.streamed import StreamedFiles
from converter.mapping import Box, Geometry, Piece, parameters
from converter.maxtext.orbax import Storage
from converter.models import MODELS
from converter.plan import make_plan
from converter.reading import ranges
from converter.schedule import Schedule, make_schedule

MODEL = "qwen3-0.6b"
REPO = "Qwen/Qwen3-0.6B"
SLOW = pytest.mark.slow


@pytest.fixture
def hub() -> Iterator[Hub]:
    with stand_in.running(REPO) as made:
        yield made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards, large enough that reading all of them shows."""
    return write_tiny(tmp_path_factory.mktemp("repository") / "hf", MODEL, shards=2, vocab_size=4096)


@pytest.fixture(scope="module")
def expected(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the folder itself gives."""
    return digests(convert(MODEL, folder, tmp_path_factory.mktemp("expected") / "out"))


def run(source: object, tmp_path: Path, *words: object, env: Mapping[str, str]) -> Run:
    """Convert in a process of its own whose home and temporary files are below `tmp_path`."""
    (tmp_path / "tmp").mkdir(exist_ok=True)
    return to_maxtext_process(
        f"model_name={MODEL}",
        f"base_output_directory={tmp_path / 'out'}",
        f"hf_model_path={source}",
        f"--report={tmp_path / 'report.json'}",
        *words,
        env={"HF_HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path / "tmp"), **env},
    )


def verify(step: Path, source: object, *words: object, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "converter", "verify", str(step), f"--source={source}", *map(str, words)],
        env=environment(env), capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip


def ranges_of(hub: Hub, name: str) -> list[tuple[int, int]]:
    """The ranges asked for of a large file, ends excluded."""
    found = [re.fullmatch(r"bytes=(\d+)-(\d+)", request.range or "") for request in hub.asked_for(name)]
    assert all(found), [request.range for request in hub.asked_for(name)]
    return [(int(each[1]), int(each[2]) + 1) for each in found if each]


def header_size(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


# What a source is called


@pytest.mark.parametrize(
    ("text", "revision", "expected"),
    [
        ("org/name", None, HubModel("org/name", None)),
        ("org/name", "v1", HubModel("org/name", "v1")),
        ("hf://org/name", None, HubModel("org/name", None)),
        ("hf://org/name", "main", HubModel("org/name", "main")),
        ("hf://org/name@refs/pr/1", None, HubModel("org/name", "refs/pr/1")),
        ("hf://org/name@v1", "v1", HubModel("org/name", "v1")),
        ("gs://models/a/b", None, BucketFolder("models", "a/b/")),
        ("gs://models/a/b/", None, BucketFolder("models", "a/b/")),
        ("gs://models", None, BucketFolder("models", "")),
        ("gs://models/", None, BucketFolder("models", "")),
    ],
)
def test_location(text: str, revision: str | None, expected: object) -> None:
    assert parse_location(text, revision) == expected


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (".", "here"),
        ("..", "above"),
        ("below/", "below"),
        ("link", "link"),
        ("hf://org/name@v1", "name"),
        ("gs://models/a/b/", "b"),
        ("gs://models", "models"),
    ],
)
def test_name_of_a_location(text: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "above" / "here"
    (here / "below").mkdir(parents=True)
    (here / "link").symlink_to("below")
    monkeypatch.chdir(here)
    assert name_of(parse_location(text, None)) == name


@pytest.mark.parametrize(
    ("text", "revision"),
    [
        ("hf://org", None),
        ("hf://org/name/more", None),
        ("hf://org/name@", None),
        ("hf://org/name@../../x", None),
        ("hf://org/name@v1", "v2"),
        ("org/name", "a b"),
        ("org/name", "../../../api"),
        ("gs://", None),
        ("gs://UPPER/a", None),
        ("gs://models/a", "main"),
        ("s3://models/a", None),
        ("https://huggingface.co/org/name", None),
        ("org/name\0", None),
        ("name", None),
        ("x" * 10_000, None),
    ],
)
def test_location_that_is_none(text: str, revision: str | None) -> None:
    with pytest.raises(RequestError):
        parse_location(text, revision)


def test_a_folder_wins_over_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert parse_location("org/name", None) == Folder(Path("org/name"))


# Checksums


def test_checksums_are_put_together() -> None:
    generator = random.Random(0)
    content = generator.randbytes(100_003)
    for _ in range(50):
        cut = generator.choice([0, 1, len(content), generator.randrange(len(content))])
        first, second = content[:cut], content[cut:]
        assert combined(crc32c(first), crc32c(second), len(second)) == crc32c(content)


def test_checksum_of_pieces_in_any_order() -> None:
    generator = random.Random(1)
    content = generator.randbytes(10_000)
    cuts = sorted({0, len(content), *(generator.randrange(len(content)) for _ in range(20))})
    parts = list(itertools.pairwise(cuts))
    generator.shuffle(parts)
    pieces = Pieces(len(content))
    for begin, end in parts[3:]:
        assert pieces.add(begin, end, crc32c(content[begin:end]))
    pieces.add(0, 10, crc32c(content[:10]))
    assert sum(end - begin for begin, end in pieces.gaps()) == sum(end - begin for begin, end in parts[:3])
    assert pieces.whole(lambda begin, end: crc32c(content[begin:end])) == crc32c(content)
    assert not pieces.add(0, 10, 5), "the same piece was another before"


# The hub, by ranges


def test_dry_run_reads_headers_only(hub: Hub, folder: Path, tmp_path: Path) -> None:
    hub.add(folder, "main")
    done = run(REPO, tmp_path, "--dry_run", env={"HF_ENDPOINT": hub.endpoint})
    assert done.code == 0, done.stderr
    assert "params.params.token_embedder.embedding" in done.stdout
    for path in folder.glob("*.safetensors"):
        assert max(end for _, end in ranges_of(hub, path.name)) == header_size(path)
    assert not (tmp_path / "out").exists()
    assert not list((tmp_path / "home").rglob("*.safetensors"))
    data = sum(path.stat().st_size - header_size(path) for path in folder.glob("*.safetensors"))
    assert f"to be read over the network: {data:,} bytes" in done.stdout


@pytest.mark.parametrize("name", [f"hf://{REPO}@v1", REPO])
def test_hub_by_ranges(name: str, hub: Hub, folder: Path, expected: dict[str, str], tmp_path: Path) -> None:
    commit = hub.add(folder, "v1", "main")
    done = run(name, tmp_path, "--cache_dir=none", env={"HF_ENDPOINT": hub.endpoint})
    assert done.code == 0, done.stderr
    assert digests(tmp_path / "out" / "0") == expected
    for path in folder.glob("*.safetensors"):
        # Everything once, whatever the order.
        assert sum(end - begin for begin, end in ranges_of(hub, path.name)) == path.stat().st_size
    assert not (tmp_path / "home").exists()
    assert not files_below(tmp_path / "tmp")
    source = json.loads((tmp_path / "report.json").read_bytes())["source"]
    assert source["revision"] == commit
    assert [file["sha256"] for file in source["files"]] == [
        hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*.safetensors"))
    ]
    checked = verify(
        tmp_path / "out", name, "--cache_dir=none", f"--spool_dir={tmp_path}", env={"HF_ENDPOINT": hub.endpoint}
    )
    assert checked.returncode == 0, checked.stderr
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("spool", [True, False])
@pytest.mark.parametrize("scan", [True, pytest.param(False, marks=SLOW)])
def test_what_is_read_in_passes_is_fetched_once_or_announced(spool: bool, scan: bool, hub: Hub, tmp_path: Path) -> None:
    """The smallest budget: each of the 16 chunks of an array that is transposed walks all of its sources."""
    folder = write_tiny(tmp_path / "hf", MODEL, shards=2)
    hub.add(folder, "main")
    words = [
        "--cache_dir=none", "--memory_budget=1", f"scan_layers={scan}",
        *([] if spool else ["--spool_dir=none"]),
    ]  # fmt: skip
    planned = run(REPO, tmp_path, "--dry_run", *words, env={"HF_ENDPOINT": hub.endpoint})
    announced = re.search(r"to be read over the network: ([\d,]+) bytes", planned.stdout)
    assert announced, planned.stderr
    hub.requests.clear()
    done = run(REPO, tmp_path, *words, env={"HF_ENDPOINT": hub.endpoint})
    assert done.code == 0, done.stderr
    direct = convert(MODEL, folder, tmp_path / "direct", f"scan_layers={scan}")
    assert digests(tmp_path / "out" / "0") == digests(direct)
    paths = list(folder.glob("*.safetensors"))
    headers = sum(map(header_size, paths))
    asked = sum(end - begin for path in paths for begin, end in ranges_of(hub, path.name))
    assert asked - headers == int(announced[1].replace(",", ""))
    assert not files_below(tmp_path / "tmp")
    if spool:
        assert asked == sum(path.stat().st_size for path in paths)
    else:
        assert asked > 1.1 * sum(path.stat().st_size for path in paths)


def test_signed_address_that_expires_is_asked_for_anew(
    hub: Hub, folder: Path, expected: dict[str, str], tmp_path: Path
) -> None:
    hub.add(folder, "main")
    asked: Counter[str] = Counter()

    def expire(method: str, path: str) -> int | None:
        asked[path] += 1
        return 403 if path.startswith("/storage/") and asked[path] in (2, 5) else None

    hub.fault = expire
    done = run(REPO, tmp_path, "--cache_dir=none", env={"HF_ENDPOINT": hub.endpoint})
    assert done.code == 0, done.stderr
    assert digests(tmp_path / "out" / "0") == expected


# The hub, by its cache


@pytest.mark.parametrize("given", [True, False])
def test_damaged_file_in_the_hubs_cache(
    given: bool, hub: Hub, folder: Path, expected: dict[str, str], tmp_path: Path
) -> None:
    """A download that was damaged is found by its sha256 and fetched again; a sound one is hashed once."""
    hub.add(folder, "main")
    name = sorted(path.name for path in folder.glob("*.safetensors"))[0]
    words = [f"--cache_dir={tmp_path / 'cache'}"] if given else []
    asked: list[str] = []

    def damage(path: str, body: bytes) -> bytes:
        if path.startswith("/storage/") and not asked and len(body) > 1000:
            asked.append(path)
            return body[:-5] + bytes([body[-5] ^ 1]) + body[-4:]
        return body

    hub.change = damage
    done = run(REPO, tmp_path, *words, env={"HF_ENDPOINT": hub.endpoint})
    assert done.code == 0, done.stderr
    assert "sha256" in done.stderr
    assert digests(tmp_path / "out" / "0") == expected
    assert (tmp_path / "cache").exists() == given
    assert (tmp_path / "home" / "hub").exists() != given
    before = len(hub.asked_for(name))
    again = run(REPO, tmp_path, *words, "--if_exists=overwrite", env={"HF_ENDPOINT": hub.endpoint})
    assert again.code == 0, again.stderr
    assert len(hub.asked_for(name)) == before


def test_cache_without_room(hub: Hub, folder: Path, tmp_path: Path) -> None:
    hub.add(folder, "main")
    hub.sizes = {path.name: 10**15 for path in folder.glob("*.safetensors")}
    done = run(REPO, tmp_path, env={"HF_ENDPOINT": hub.endpoint})
    assert done.code == 3, done.stderr
    assert "GB needed" in done.errors[0]
    assert not any(hub.asked_for(path.name) for path in folder.glob("*.safetensors"))


def test_two_processes_with_one_cache(
    hub: Hub, bucket: Bucket, folder: Path, expected: dict[str, str], tmp_path: Path
) -> None:
    hub.add(folder, "main")
    sources = [REPO, bucket.add(folder, "two")]
    env = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home"), **bucket.environment()}
    started = [
        start_to_maxtext(
            f"model_name={MODEL}", f"hf_model_path={source}", f"base_output_directory={tmp_path / f'{i}-{j}'}",
            f"--cache_dir={tmp_path / 'cache'}", env=env,
        )
        for i, source in enumerate(sources)
        for j in range(2)
    ]  # fmt: skip
    for process in started:
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
    for i in range(2):
        for j in range(2):
            assert digests(tmp_path / f"{i}-{j}" / "0") == expected
    for path in folder.glob("*.safetensors"):
        assert len(hub.asked_for(path.name)) == 1


# Buckets


@pytest.mark.parametrize("cached", [False, True])
def test_bucket(cached: bool, bucket: Bucket, folder: Path, expected: dict[str, str], tmp_path: Path) -> None:
    source = bucket.add(folder, f"some/folder-{cached}")
    words = [f"--cache_dir={tmp_path / 'cache'}"] if cached else []
    with Proxy(bucket.server) as proxy:
        env = bucket.environment(proxy.url)
        planned = run(source, tmp_path, "--dry_run", *words, env=env)
        assert planned.code == 0, planned.stderr
        done = run(source, tmp_path, *words, env=env)
        assert done.code == 0, done.stderr
        assert digests(tmp_path / "out" / "0") == expected
        described = json.loads((tmp_path / "report.json").read_bytes())["source"]
        assert [(file["bytes"], file["crc32c"]) for file in described["files"]] == [
            (len(content), f"{crc32c(content):08x}")
            for content in (path.read_bytes() for path in sorted(folder.glob("*.safetensors")))
        ]
        skipped = run(source, tmp_path, "--if_exists=skip", *words, env=env)
        assert skipped.code == 0, skipped.stderr
        assert "nothing to do" in skipped.stderr
        checked = verify(tmp_path / "out", source, *words, env=env)
        assert checked.returncode == 0, checked.stderr
        if cached:
            proxy.requests.clear()
            again = run(source, tmp_path, "--if_exists=overwrite", *words, env=env)
            assert again.code == 0, again.stderr
            assert not [address for _, address, _ in proxy.requests if "alt=media" in address]
        else:
            assert not (tmp_path / "cache").exists()
    assert not files_below(tmp_path / "tmp")


@pytest.mark.parametrize("case", [case for case in CASES if case.scan][:3], ids=str)
def test_bucket_equals_maxtext(case: Case, bucket: Bucket, tmp_path: Path) -> None:
    """Against MaxText's own conversion of the same weights."""
    oracle = json.loads((DATA / case.family / "oracle.json").read_bytes())
    done = to_maxtext_process(
        f"model_name={oracle['model_name']}",
        f"base_output_directory={tmp_path / 'out'}",
        f"hf_model_path={bucket.add(DATA / case.family / case.source, f'{case.family}-{case.source}')}",
        f"--save_dtype={'float32' if case.source == 'hf_f32' else 'bfloat16'}",
        *(f"{word}={value}" for word, value in oracle["words"].items()),
        env=bucket.environment(),
    )
    assert done.code == 0, done.stderr
    assert digests(tmp_path / "out" / "0") == {name: array["sha256"] for name, array in case.expected["arrays"].items()}


@pytest.mark.parametrize("family", ["deepseek3", pytest.param("qwen3-next", marks=SLOW)])
def test_ranges_come_from_the_group_they_were_announced_for(
    family: str, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small tensors lie between large ones and are read again and again, slowly, so that much is here too early."""
    for name, value in bucket.environment().items():
        monkeypatch.setenv(name, value)
    source = DATA / family / "hf_bf16"
    model = json.loads((DATA / family / "oracle.json").read_bytes())["model_name"]
    words = (f"model_name={model}", "--memory_budget=1", "--threads=8")
    elements, fetch = Repository.elements, StreamedFiles.fetch
    unannounced: list[tuple[str, int, int]] = []

    def slow(self: Repository, name: str, part: slice) -> np.ndarray:
        if threading.current_thread().name.startswith("converter"):
            time.sleep(0.002)
        return elements(self, name, part)

    def noted(self: StreamedFiles, name: str, begin: int, end: int) -> memoryview:
        if threading.current_thread().name.startswith("converter"):
            unannounced.append((name, begin, end))
        return fetch(self, name, begin, end)

    monkeypatch.setattr(Repository, "elements", slow)
    monkeypatch.setattr(StreamedFiles, "fetch", noted)
    done = to_maxtext(
        *words, f"base_output_directory={tmp_path / 'out'}", f"hf_model_path={bucket.add(source, family)}"
    )
    assert done.code == 0, done.stderr
    assert digests(tmp_path / "out" / "0") == digests(convert(model, source, tmp_path / "here"))
    assert not unannounced


def test_damaged_range_of_a_bucket_is_found(bucket: Bucket, folder: Path, tmp_path: Path) -> None:
    source = bucket.add(folder, "damaged")
    with Proxy(bucket.server) as proxy:
        proxy.faults = Faults(flip=1.0, only=lambda method, address: "alt=media" in address and "00002-of" in address)
        done = run(source, tmp_path, "--retry_seconds=2", env=bucket.environment(proxy.url))
    assert done.code == 3, done.stderr
    assert len(done.errors) == 1
    assert not (tmp_path / "out" / "0").exists()


WAYS = ("folder", "hub's cache", "hub by ranges", "bucket's cache", "bucket by ranges")


@pytest.fixture
def broken(folder: Path, tmp_path: Path) -> Path:
    """A repository in which a header is no JSON."""
    made = shutil.copytree(folder, tmp_path / "broken")
    path = made / "model-00002-of-00002.safetensors"
    content = bytearray(path.read_bytes())
    content[8] ^= 1
    path.write_bytes(content)
    return made


@pytest.mark.parametrize("way", WAYS)
def test_broken_header(way: str, broken: Path, hub: Hub, bucket: Bucket, tmp_path: Path) -> None:
    """It is the repository's own, wherever that lies: trying again is useless."""
    commit = hub.add(broken, "main")
    where = {"folder": broken, "hub": f"hf://{REPO}@{commit}", "bucket": bucket.add(broken, "broken")}
    source = where[way.split("'")[0].split()[0]]
    cache = tmp_path / "cache" if "cache" in way else "none"
    env = {"HF_ENDPOINT": hub.endpoint, **bucket.environment()}
    done = run(source, tmp_path, f"--cache_dir={cache}", "--retry_seconds=2", env=env)
    assert done.code == 2, done.stderr
    assert len(done.errors) == 1
    assert "model-00002-of-00002.safetensors has a broken safetensors header" in done.errors[0]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("way", [way for way in WAYS if "ranges" in way])
def test_header_damaged_on_the_way(way: str, folder: Path, hub: Hub, bucket: Bucket, tmp_path: Path) -> None:
    """It comes differently when asked for again: trying again can help."""
    commit = hub.add(folder, "main")
    hub.storage = ""
    hubs = way.startswith("hub")
    name = "model-00002-of-00002.safetensors"
    address = f"/storage/{stand_in.sha256((folder / name).read_bytes())}" if hubs else f"{name}?alt=media"
    asked: list[str] = []

    def once(_: str, found: str) -> bool:
        """What is asked for first is how long the header is."""
        if address in found:
            asked.append(found)
        return address in found and len(asked) == 1

    with Proxy(hub.endpoint if hubs else bucket.server) as proxy:
        proxy.faults = Faults(flip=1.0, only=once)
        env = {"HF_ENDPOINT": proxy.url} if hubs else dict(bucket.environment(proxy.url))
        source = f"hf://{REPO}@{commit}" if hubs else bucket.add(folder, "sound")
        done = run(source, tmp_path, "--cache_dir=none", "--retry_seconds=2", env=env)
        assert proxy.count("flip") == 1
    assert done.code == 3, done.stderr
    assert len(done.errors) == 1
    assert not (tmp_path / "out" / "0").exists()


def test_damaged_weights_of_a_bucket_are_found(bucket: Bucket, folder: Path, tmp_path: Path) -> None:
    source = bucket.add(folder, "damaged-once")
    for cached in (False, True):
        asked: list[str] = []

        def once(method: str, address: str, asked: list[str] = asked) -> bool:
            # The sixth is none of config, index and headers.
            if "alt=media" in address:
                asked.append(address)
            return "alt=media" in address and len(asked) == 7

        with Proxy(bucket.server, Faults(flip=1.0, only=once)) as proxy:
            words = [f"--cache_dir={tmp_path / 'cache'}"] if cached else []
            done = run(source, tmp_path, *words, env=bucket.environment(proxy.url))
            if cached:
                continue
            assert proxy.count("flip") == 1
        assert done.code == 3, done.stderr
        assert "CRC-32C" in done.errors[0]
        assert not (tmp_path / "out" / "0").exists()


def test_object_that_is_replaced_meanwhile(bucket: Bucket, folder: Path, tmp_path: Path) -> None:
    source = bucket.add(folder, "replaced")
    name = sorted(path.name for path in folder.glob("*.safetensors"))[0]

    def replace(method: str, address: str) -> bool:
        if name in address and "alt=media" in address:
            bucket.put(f"replaced/{name}", (folder / name).read_bytes()[:-2] + b"ab")
        return False

    with Proxy(bucket.server, Faults(only=replace)) as proxy:
        done = run(source, tmp_path, "--retry_seconds=2", env=bucket.environment(proxy.url))
    assert done.code in (2, 3), done.stderr
    assert not (tmp_path / "out" / "0").exists()


@pytest.mark.parametrize("path", ["gs://models/nothing", "gs://other-bucket/x"])
def test_bucket_that_lacks_it(path: str, bucket: Bucket, tmp_path: Path) -> None:
    done = run(path, tmp_path, env=bucket.environment())
    assert done.code == 2, done.stderr
    assert len(done.errors) == 1


def test_bucket_with_pickles_only(bucket: Bucket, folder: Path, tmp_path: Path) -> None:
    bucket.put("pickles/config.json", (folder / "config.json").read_bytes())
    bucket.put("pickles/pytorch_model.bin", b"pickle")
    with Proxy(bucket.server) as proxy:
        done = run(bucket.url("pickles"), tmp_path, env=bucket.environment(proxy.url))
        assert not [address for _, address, _ in proxy.requests if "pytorch_model" in address]
    assert done.code == 2, done.stderr
    assert "pickles" in done.errors[0]


def test_local_run_imports_nothing_of_the_network() -> None:
    code = (
        "import sys; import converter.run; "
        "print([name for name in ('requests', 'google.auth', 'huggingface_hub', 'google.cloud.storage') "
        "if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def planned(
    model: str, layers: int, threads: int, tmp_path: Path, *, fp8: bool = False
) -> tuple[Schedule, Weights, int]:
    """The schedule of a model with fewer layers whose weights are holes, and their bytes."""
    config = make_config(model, num_hidden_layers=layers)
    sizes = tensor_shapes(MODELS[model], config)
    stored = {name: ("BF16", shape) for name, shape in sizes.items()}
    if fp8:
        config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
        for name, shape in sizes.items():
            if name.endswith("_proj.weight"):
                stored[name] = ("F8_E4M3", shape)
                stored[f"{name}_scale_inv"] = ("F32", tuple(-(-size // 128) for size in shape))
    folder = write_sparse(tmp_path / "hf", config, stored)
    weights = open_weights(open_repository(locate(str(folder), revision=None, token=None)), BFLOAT16)
    family = MODELS[model]
    filled = family.fill(config)
    made = parameters(
        family,
        Geometry(filled, filled["vocab_size"], layers),
        weights.tensors,
        save_dtype=BFLOAT16,
        scan=True,
        scan_axis=1,
    )
    plan = make_plan(
        made, weights.repository.positions(), devices=16, scan=True, storage=Storage(True, True, True, 2**31)
    )
    nbytes = sum(math.prod(shape) * 2 for shape in sizes.values())
    reading = fetching.reading(threads, nbytes, plan.largest_chunk)
    return make_schedule(plan, plan.largest_chunk, threads, 0, reading), weights, nbytes


def test_planning_what_experts_are_read_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk of stacked experts is looked for in the few tensors that it needs, not in those of all experts."""
    schedule, weights, nbytes = planned("qwen3-30b-a3b", 2, 4, tmp_path)
    asked = []
    intersect = stream.intersect

    def counted(piece: Piece, box: Box) -> tuple[Box, Box] | None:
        asked.append(piece)
        return intersect(piece, box)

    monkeypatch.setattr(stream, "intersect", counted)
    found = list(fetching.segments(schedule, weights, (), spooled=False))
    assert {segment.group for segment in found} == set(range(len(schedule.groups)))
    assert len(schedule.groups) > 40
    assert sum(segment.size for segment in found) >= nbytes
    assert len(asked) < 2 * sum(len(segment.parts) for segment in found)


@pytest.mark.parametrize("threads", [2, 64])
def test_what_is_kept_is_fetched_and_planned_once(
    threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However small the tasks of many threads are, and however often stacks are walked."""
    schedule, weights, nbytes = planned("llama3.1-70b", 2, threads, tmp_path)
    made = []
    task = stream.Task

    def counted(*parts: Any, **named: Any) -> stream.Task:
        made.append(parts)
        return task(*parts, **named)

    monkeypatch.setattr(stream, "Task", counted)
    found = list(fetching.segments(schedule, weights, (), spooled=True))
    assert sum(segment.size for segment in found) == nbytes
    assert len(schedule.groups) > 60
    assert len(made) < 1.2 * sum(len(segment.parts) for segment in found)


@pytest.mark.parametrize("threads", [2, 64])
def test_segments_come_in_the_order_of_the_walk(threads: int, tmp_path: Path) -> None:
    """Backwards, too, where the scales of a whole tensor are needed with the last of its codes: else all would wait."""
    schedule, weights, _ = planned("deepseek3-671b", 4, threads, tmp_path, fp8=True)
    assert weights.encodings
    found: dict[int, list[Segment]] = {}
    for segment in fetching.segments(schedule, weights, set(weights.encodings), spooled=False):
        found.setdefault(segment.group, []).append(segment)
    for number, group in enumerate(schedule.groups):
        tasks = list(stream.tasks_of(group, schedule.reading.task_bytes, set(weights.encodings)))
        first: dict[tuple[str, int, int], int] = {}
        for at, task in enumerate(reversed(tasks) if number % 2 else tasks):
            for tensor, begin, end in ranges(weights, task.piece, task.source):
                first.setdefault((tensor.file, begin, end), at)
        needed = [min(first[(segment.file, *part)] for part in segment.parts) for segment in found[number]]
        assert needed == sorted(needed)
