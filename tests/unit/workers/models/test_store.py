import hashlib
import json
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import zipfile
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import httpx
import huggingface_hub
import pytest
from huggingface_hub import errors as hub_errors

from workers.models.catalog import PackagedModel, PackagedWheel
from workers.models.downloads import download_from_hub, download_with_pip
from workers.models.errors import (
    ModelAccessError,
    ModelFormatError,
    ModelIntegrityError,
    ModelNotFoundError,
)
from workers.models.store import (
    RECORD_NAME,
    ModelStore,
    default_cache_dir,
)

CONTENT = b"GGUF" + bytes(range(256)) * 40
PULLED_AT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def make_wheel(directory: Path, *, distribution="fake-model", version="1.0", content=CONTENT):
    module = distribution.replace("-", "_")
    path = directory / f"{module}-{version}-py3-none-any.whl"
    info = f"{module}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{module}/model.gguf", content)
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    wheel = PackagedWheel(
        distribution=distribution,
        version=version,
        sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        size_bytes=path.stat().st_size,
        member=f"{module}/model.gguf",
    )
    return path, wheel


class FakeRegistry:
    """Serves wheels from a folder and counts how often it was asked."""

    def __init__(self, *paths: Path) -> None:
        self.paths = {path.name.split("-")[0]: path for path in paths}
        self.num_fetches = 0

    def __call__(self, wheel: PackagedWheel, directory: Path) -> Path:
        self.num_fetches += 1
        return Path(shutil.copy(self.paths[wheel.distribution.replace("-", "_")], directory))


def fake_convert(source, target, progress):
    target.mkdir()
    (target / "config.json").write_text("{}")
    (target / "model.safetensors").write_bytes(source.read_bytes())
    progress(1, 2)
    progress(2, 2)


@pytest.fixture
def wheel_path_and_model(tmp_path):
    path, wheel = make_wheel(tmp_path)
    model = PackagedModel(
        name="fake",
        description="a fake",
        origin="nobody/fake",
        licence="MIT",
        num_parameters=1,
        wheels=(wheel,),
        gguf_sha256=hashlib.sha256(CONTENT).hexdigest(),
        gguf_size_bytes=len(CONTENT),
    )
    return path, model


@pytest.fixture
def make_store(tmp_path, wheel_path_and_model):
    path, model = wheel_path_and_model

    def make(**options):
        arguments = {
            "catalog": {model.name: model},
            "fetch_wheel": FakeRegistry(path),
            "convert": fake_convert,
            "now": lambda: PULLED_AT,
        }
        return ModelStore(tmp_path / "cache", **(arguments | options))

    return make


def remaining_files(store: ModelStore) -> list[str]:
    return [
        path.name
        for path in store.cache_dir.rglob("*")
        if path.is_file() and path.suffix != ".lock"
    ]


# --- default_cache_dir ---


def test_cache_dir_is_baton_cache_then_xdg_then_home(monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    chosen = {"BATON_CACHE": "/c", "XDG_CACHE_HOME": "/x"}
    assert default_cache_dir(chosen) == Path("/c")
    assert default_cache_dir({"BATON_CACHE": "~/c"}) == Path("/home/somebody/c")
    assert default_cache_dir({"XDG_CACHE_HOME": "/x"}) == Path("/x/baton")
    assert default_cache_dir({"XDG_CACHE_HOME": "x"}) == Path("/home/somebody/.cache/baton")
    assert default_cache_dir({}) == Path("/home/somebody/.cache/baton")


# --- pull ---


def test_pull_puts_the_converted_model_in_place_with_its_record(make_store):
    store = make_store()
    stages = []

    path = store.pull("fake", lambda progress: stages.append(progress.stage))

    assert path == store.cache_dir / "models" / "fake"
    assert (path / "model.safetensors").read_bytes() == CONTENT
    record = json.loads((path / RECORD_NAME).read_text())
    assert record["licence"] == "MIT"
    assert record["origin"] == "nobody/fake"
    assert record["packages"][0]["requirement"] == "fake-model==1.0"
    assert record["files"]["model.safetensors"] == {
        "sha256": hashlib.sha256(CONTENT).hexdigest(),
        "size_bytes": len(CONTENT),
    }
    assert list(dict.fromkeys(stages)) == ["downloading", "verifying", "converting", "done"]
    assert not list((store.cache_dir / "staging").iterdir())


def test_second_pull_fetches_nothing(make_store, wheel_path_and_model):
    registry = FakeRegistry(wheel_path_and_model[0])
    store = make_store(fetch_wheel=registry)
    assert store.pull("fake") == store.pull("fake")
    assert registry.num_fetches == 1


def test_pull_refuses_an_unknown_name_and_lists_the_catalogue(make_store):
    with pytest.raises(ModelNotFoundError, match=r"'nope'.*catalogue has fake"):
        make_store().pull("nope")


def test_pull_refuses_a_corrupt_wheel_and_keeps_nothing(make_store, wheel_path_and_model):
    path, _ = wheel_path_and_model
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    store = make_store()

    with pytest.raises(ModelIntegrityError, match=r"fake-model==1\.0 has SHA-256 .* is pinned"):
        store.pull("fake")

    assert remaining_files(store) == []
    assert store.list() == []


def test_pull_refuses_a_gguf_that_is_not_the_pinned_one(make_store, wheel_path_and_model):
    model = replace(wheel_path_and_model[1], gguf_sha256="0" * 64)
    store = make_store(catalog={"fake": model})
    with pytest.raises(ModelIntegrityError, match="the GGUF file of fake"):
        store.pull("fake")
    assert remaining_files(store) == []


def test_pull_refuses_a_wheel_without_the_member(make_store, wheel_path_and_model):
    model = wheel_path_and_model[1]
    wheels = (replace(model.wheels[0], member="fake_model/other.gguf"),)
    store = make_store(catalog={"fake": replace(model, wheels=wheels)})
    with pytest.raises(ModelIntegrityError, match=r"does not hold fake_model/other\.gguf"):
        store.pull("fake")


def test_members_of_several_wheels_are_joined_in_order(tmp_path, make_store, wheel_path_and_model):
    halves = [
        make_wheel(tmp_path, distribution=f"fake-part-{n}", content=part)
        for n, part in enumerate((CONTENT[:100], CONTENT[100:]))
    ]
    model = replace(wheel_path_and_model[1], wheels=tuple(wheel for _, wheel in halves))
    store = make_store(
        catalog={"fake": model}, fetch_wheel=FakeRegistry(*(path for path, _ in halves))
    )
    assert (store.pull("fake") / "model.safetensors").read_bytes() == CONTENT


def test_failed_conversion_leaves_no_model(make_store):
    def fail_half_way(source, target, progress):
        target.mkdir()
        (target / "model.safetensors").write_bytes(b"half")
        raise ModelFormatError("half way")

    store = make_store(convert=fail_half_way)
    with pytest.raises(ModelFormatError, match="half way"):
        store.pull("fake")
    assert remaining_files(store) == []


def test_unwritable_cache_is_a_sentence(tmp_path, make_store):
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(ModelAccessError, match="could not be written to the cache"):
        make_store().pull("fake")


def test_killed_pull_leaves_no_half_model_and_the_next_one_succeeds(make_store):
    """A process dies by SIGKILL in the middle of a fetch, holding the lock."""
    store = make_store()
    script = textwrap.dedent(
        f"""
        import dataclasses, os, signal
        from pathlib import Path
        from workers.models.catalog import MODELS
        from workers.models.store import ModelStore

        def die(wheel, directory):
            (directory / "half.whl").write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)

        model = dataclasses.replace(MODELS["smollm2-135m"], name="fake")
        cache_dir = Path({str(store.cache_dir)!r})
        ModelStore(cache_dir, catalog={{"fake": model}}, fetch_wheel=die).pull("fake")
        """
    )
    died = subprocess.run([sys.executable, "-c", script], check=False)
    assert died.returncode == -signal.SIGKILL
    assert (store.cache_dir / "staging" / "fake" / "half.whl").exists()
    assert store.list() == []

    store.pull("fake")

    assert [model.name for model in store.list()] == ["fake"]
    assert not list((store.cache_dir / "staging").iterdir())


def test_concurrent_pulls_fetch_once_and_both_succeed(make_store, wheel_path_and_model):
    """The first fetch waits until the second pull says that it waits for the lock."""
    registry = FakeRegistry(wheel_path_and_model[0])
    has_begun, is_waiting = threading.Event(), threading.Event()

    def slow_fetch(wheel, directory):
        has_begun.set()
        assert is_waiting.wait(timeout=30)
        return registry(wheel, directory)

    paths = []
    first = threading.Thread(
        target=lambda: paths.append(make_store(fetch_wheel=slow_fetch).pull("fake"))
    )
    first.start()
    assert has_begun.wait(timeout=30)
    second = make_store(fetch_wheel=registry)
    paths.append(
        second.pull("fake", lambda progress: progress.stage == "waiting" and is_waiting.set())
    )
    first.join(timeout=30)

    assert paths == [second.cache_dir / "models" / "fake"] * 2
    assert registry.num_fetches == 1


def test_pull_replaces_a_model_of_another_conversion(make_store, monkeypatch):
    store = make_store()
    path = store.pull("fake")
    record_path = path / RECORD_NAME
    record = json.loads(record_path.read_text()) | {"conversion_version": 0}
    record_path.write_text(json.dumps(record))
    assert [model.is_current for model in store.list()] == [False]
    assert store.resolve("fake").path == path

    assert store.pull("fake") == path

    assert [model.is_current for model in store.list()] == [True]


# --- list ---


def test_list_says_what_the_record_says(make_store):
    store = make_store()
    assert store.list() == []
    store.pull("fake")
    (model,) = store.list()
    assert (model.name, model.licence, model.origin) == ("fake", "MIT", "nobody/fake")
    assert model.packages == ("fake-model==1.0",)
    assert model.pulled_at == PULLED_AT
    assert model.size_bytes == len(CONTENT) + 2
    assert model.is_current


def test_list_passes_over_what_it_cannot_understand(make_store):
    store = make_store()
    store.pull("fake")
    other = store.cache_dir / "models" / "other"
    other.mkdir()
    (other / RECORD_NAME).write_text("[]")
    assert [model.name for model in store.list()] == ["fake"]


# --- resolve ---


def test_resolve_of_a_pulled_model(make_store):
    store = make_store()
    path = store.pull("fake")
    source = store.resolve("fake")
    assert (source.path, source.kind, source.licence) == (path, "packaged", "MIT")


def test_resolve_of_an_absent_model_says_how_to_pull_it(make_store):
    with pytest.raises(ModelNotFoundError, match="run `baton models pull fake` first"):
        make_store().resolve("fake")


@pytest.mark.parametrize("source", ["nope", "./nope", "/nope/at/all", "a/b/c"])
def test_resolve_refuses_what_is_neither_name_nor_directory_nor_hub_id(make_store, source):
    with pytest.raises(ModelNotFoundError, match="neither a packaged model"):
        make_store().resolve(source)


def test_resolve_of_a_local_directory(tmp_path, make_store):
    local = tmp_path / "mine"
    local.mkdir()
    (local / "config.json").write_text("{}")
    (local / "model.safetensors").write_bytes(b"")
    source = make_store().resolve(str(local))
    assert (source.name, source.path, source.kind) == ("mine", local, "local")


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        (["model.safetensors"], "it has no config.json"),
        (["config.json", "pytorch_model.bin"], "only as pickle files"),
        (["config.json", "model.pt"], "only as pickle files"),
        (["config.json"], "no weights to load"),
    ],
)
def test_resolve_refuses_directories_that_cannot_be_loaded(tmp_path, make_store, files, sentence):
    local = tmp_path / "mine"
    local.mkdir()
    for name in files:
        (local / name).write_text("{}")
    with pytest.raises(ModelFormatError, match=sentence):
        make_store().resolve(str(local))


def test_resolve_of_a_hub_id_fetches_it_below_the_cache(tmp_path, make_store):
    def fetch(repo_id, cache_dir):
        snapshot = cache_dir / "snapshot"
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text("{}")
        (snapshot / "model.safetensors").write_bytes(b"")
        return snapshot

    store = make_store(fetch_snapshot=fetch)
    source = store.resolve("org/name")
    assert (source.name, source.kind) == ("org/name", "hub")
    assert source.path == store.cache_dir / "hub" / "snapshot"


def hub_error(kind, status):
    request = httpx.Request("GET", "https://hub.invalid/api")
    return kind("refused", response=httpx.Response(status, request=request))


def not_cached(cause=None):
    error = hub_errors.LocalEntryNotFoundError("not cached")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "expected", "sentence"),
    [
        (hub_error(hub_errors.GatedRepoError, 403), ModelAccessError, "set HF_TOKEN"),
        (hub_error(hub_errors.RepositoryNotFoundError, 401), ModelAccessError, "set HF_TOKEN"),
        (not_cached(hub_error(hub_errors.HfHubHTTPError, 403)), ModelAccessError, "set HF_TOKEN"),
        (hub_error(hub_errors.RepositoryNotFoundError, 404), ModelNotFoundError, "has no model"),
        (hub_error(hub_errors.HfHubHTTPError, 503), ModelAccessError, "status 503"),
        (not_cached(), ModelAccessError, "could not be reached for org/name"),
        (not_cached(OSError("no route")), ModelAccessError, "check the network"),
        (hub_errors.OfflineModeIsEnabled("offline"), ModelAccessError, "check the network"),
        (hub_errors.HFValidationError("bad"), ModelNotFoundError, "not a valid hub id"),
        (OSError(28, "No space left"), ModelAccessError, "could not be written"),
    ],
)
def test_hub_failures_become_sentences(monkeypatch, tmp_path, error, expected, sentence):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(expected, match=sentence):
        download_from_hub("org/name", tmp_path)


def test_offline_hub_with_an_empty_cache_is_a_sentence(monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelAccessError, match="no complete copy is in the cache"):
        download_from_hub("org/name", tmp_path)


# --- pip ---


@pytest.fixture
def local_index(tmp_path, monkeypatch):
    """A folder that pip's own configuration names as its only source."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_pip_download_honours_pips_configuration(local_index, tmp_path):
    path, wheel = make_wheel(local_index, distribution="baton-fixture")
    target = tmp_path / "target"
    target.mkdir()
    fetched = download_with_pip(wheel, target)
    assert fetched == target / path.name
    assert fetched.read_bytes() == path.read_bytes()


def test_pip_failure_is_a_sentence_with_pips_reason(local_index, tmp_path):
    _, wheel = make_wheel(tmp_path, distribution="baton-fixture")
    with pytest.raises(
        ModelAccessError, match=r"could not download baton-fixture==1\.0 .*No matching distribution"
    ):
        download_with_pip(wheel, local_index)
