"""A directory that one running Baton owns, and what a killed owner left there.

The directory holds a lock, a record of the running instance and the logs of the last one. Sockets
live in a runtime directory with a short name, since the path of a socket may have about 100
characters. Only processes that carry the recorded id are ever ended.
"""

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from deployments.cluster.errors import ClusterError, InstanceBusyError, PortInUseError
from deployments.cluster.ports import Ports, choose_ports, is_free
from deployments.cluster.processes import Watchdog, end_members

RUNTIME_PREFIX = "baton-"
# HAProxy binds `<runtime dir>/<node id>/a.<pid>.tmp`, of at most 97 characters: 56 for Ray's node
# id and 17 for the rest leave this much.
MAX_RUNTIME_PATH = 97 - 56 - 17


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One run of Baton on this host."""

    instance_id: str
    directory: Path
    runtime_dir: Path
    host: str
    port: int
    ports: Ports

    @property
    def logs_dir(self) -> Path:
        """The logs of Ray and Serve: of this run while it lasts, of the last one after it."""
        return self.directory / "logs"

    @property
    def ray_dir(self) -> Path:
        """What Ray calls its temporary directory."""
        return self.runtime_dir / "ray"


@contextlib.contextmanager
def claim(directory: Path, *, host: str, port: int) -> Iterator[Instance]:
    """Own the directory while the block runs; first end what a killed owner left running.

    At the end of the block every process with the instance's marker is ended. If this process is
    killed before, a watchdog does that.

    Raises InstanceBusyError when another live process owns it, PortInUseError when the HTTP port
    is taken by somebody who is not a leftover of ours.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    record = directory / "instance.json"
    with _lock(directory / "lock", record):
        clean(directory)
        if not is_free(host, port):
            raise PortInUseError(f"port {port} on {host} is in use by another process")
        instance = Instance(
            instance_id=secrets.token_hex(8),
            directory=directory,
            runtime_dir=_make_runtime_dir(),
            host=host,
            port=port,
            ports=choose_ports(port),
        )
        # written before anything starts: a kill at any later moment leaves what to clean
        _write_record(record, instance)
        watchdog = Watchdog(instance.instance_id)
        try:
            _link_logs(instance)
            yield instance
        finally:
            clean(directory)  # under the watchdog's eyes until the last process is gone
            watchdog.stop()


def clean(directory: Path) -> None:
    """End the recorded instance, if there is one, and remove its files; keep its logs.

    Only for who holds the lock.
    """
    record = directory / "instance.json"
    last = _read_record(record)
    if last is None:
        return
    instance_id, runtime_dir = last
    remaining = end_members(instance_id)
    if remaining:
        pids = ", ".join(str(process.pid) for process in remaining)
        raise ClusterError(f"processes of the last run do not end: {pids}")
    if _is_ours(runtime_dir):
        _keep_logs(runtime_dir, directory / "logs")
        shutil.rmtree(runtime_dir, ignore_errors=True)
    record.unlink()


@contextlib.contextmanager
def _lock(path: Path, record: Path) -> Iterator[None]:
    # not inheritable, so no child keeps the directory locked after its owner
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InstanceBusyError(
                f"{path.parent} is in use by a running Baton (pid {_owner_pid(record)}): stop it, "
                "or choose another directory and port"
            ) from None
        yield
    finally:
        os.close(descriptor)


def _owner_pid(record: Path) -> str:
    try:
        return str(json.loads(record.read_text())["pid"])
    except (OSError, ValueError, KeyError, TypeError):
        return "unknown"


def _make_runtime_dir() -> Path:
    path = Path(tempfile.mkdtemp(prefix=RUNTIME_PREFIX))
    if len(str(path)) > MAX_RUNTIME_PATH:
        path.rmdir()
        raise ClusterError(
            f"the temporary directory {path.parent} has too long a name for sockets: at most "
            f"{MAX_RUNTIME_PATH - len(path.name) - 1} characters; set TMPDIR to a shorter one"
        )
    return path


def _write_record(path: Path, instance: Instance) -> None:
    content = {
        "instance_id": instance.instance_id,
        "runtime_dir": str(instance.runtime_dir),
        "host": instance.host,
        "port": instance.port,
        "pid": os.getpid(),
    }
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=2) + "\n")
    temporary.replace(path)


def _read_record(path: Path) -> tuple[str, Path] | None:
    try:
        content = json.loads(path.read_text())
        return str(content["instance_id"]), Path(content["runtime_dir"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise ClusterError(f"{path} is not the record of an instance: {error!r}") from error


def _is_ours(runtime_dir: Path) -> bool:
    """Whether it is such a directory as `claim` makes; a record could be edited by hand."""
    return runtime_dir.name.startswith(RUNTIME_PREFIX) and (
        runtime_dir.is_dir() and runtime_dir.stat().st_uid == os.getuid()
    )


def _link_logs(instance: Instance) -> None:
    _remove_logs(instance.logs_dir)
    instance.logs_dir.symlink_to(instance.ray_dir / "session_latest" / "logs")


def _keep_logs(runtime_dir: Path, logs_dir: Path) -> None:
    """Move the last run's logs out of the directory that goes."""
    source = (runtime_dir / "ray" / "session_latest" / "logs").resolve()
    if source.is_dir():
        _remove_logs(logs_dir)
        shutil.move(source, logs_dir)


def _remove_logs(logs_dir: Path) -> None:
    if logs_dir.is_symlink():
        logs_dir.unlink()
    elif logs_dir.is_dir():
        shutil.rmtree(logs_dir)
