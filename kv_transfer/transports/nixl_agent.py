"""One NIXL agent: memory that it may read into or be read from, and READs from other agents.

Owns the agent and with it the fence. What was measured of NIXL 1.5.1 with UCX decides its shape:
no released handle, removed peer or deregistered memory stops a READ that is under way over TCP,
only the end of the agent does; a READ of which a part has failed may still write its others; an
owner whose memory is unmapped under a READ crashes. So an agent is ended as a whole, it is an error
if it then still lives, and the memory lives as long as the agent.

An agent is not safe for threads: after its creation it belongs to one.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import importlib.util
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from kv_transfer.geometry import BlockId
from kv_transfer.transport import BlockMemory
from kv_transfer.ucx_device import NIXL_IS_MISSING

_PACKAGES = ("nixl_cu13", "nixl_cu12")  # the same code for two CUDA releases; neither needs a GPU

Descriptor = tuple[int, int, int]
"""Address, bytes, device."""


class NixlMissingError(RuntimeError):
    """The optional package is not installed, or does not load."""


class _Binding(Protocol):
    """What is behind an agent: it ends when nobody refers to this any more."""


class _Agent(Protocol):
    """The part of `nixl_agent` that is used."""

    agent: _Binding

    def create_backend(self, backend: str, parameters: dict[str, str]) -> None: ...

    def register_memory(self, regions: list[tuple[int, int, int, str]], kind: str) -> object: ...

    def get_agent_metadata(self) -> bytes: ...

    def add_remote_agent(self, metadata: bytes) -> str | bytes: ...

    def get_xfer_descs(self, descriptors: Sequence[Descriptor], kind: str) -> object: ...

    def initialize_xfer(
        self, operation: str, local: object, remote: object, peer: str
    ) -> object: ...

    def transfer(self, handle: object) -> str: ...

    def check_xfer_state(self, handle: object) -> str: ...

    def release_xfer_handle(self, handle: object) -> None: ...

    def get_new_notifs(self) -> object: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Nixl:
    """The optional package."""

    make_agent: Callable[..., _Agent]
    make_config: Callable[..., object]
    errors: tuple[type[Exception], ...]
    """Everything that it raises; they have no root of their own."""


class ReadState(Enum):
    """How far a READ is."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    """Some of it was not read, and the rest may still be written: only the fence ends it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemotePool:
    """Another agent's memory."""

    metadata: bytes
    """The agent's, as NIXL packs it."""
    address: int
    num_blocks: int
    bytes_per_block: int


class Read:
    """A READ that was begun; its agent's alone."""

    def __init__(self, handle: object, state: ReadState) -> None:
        """Made by `NixlAgent.read`."""
        self.handle: object | None = handle
        self.state = state


def has_nixl() -> bool:
    """Whether the optional package is installed; it is not loaded for that."""
    return any(importlib.util.find_spec(package) is not None for package in _PACKAGES)


def nixl_problem() -> str:
    """Why the package does not load, empty if it does; loads it."""
    try:
        _load()
    except NixlMissingError as error:
        return str(error)
    return ""


def require_nixl() -> None:
    """Raise NixlMissingError, which says what to install, where the package is missing."""
    _load()


def _load() -> _Nixl:
    problem = NIXL_IS_MISSING
    for package in _PACKAGES:
        raises = logging.raiseExceptions
        try:
            interface: Any = importlib.import_module(f"{package}._api")  # it has no types
            bindings = importlib.import_module(f"{package}._bindings")
        except (ImportError, OSError) as error:  # OSError: a library that it opens itself
            if importlib.util.find_spec(package) is not None:
                problem = f"its package {package} is installed and does not load: {error}"
            continue
        finally:
            logging.raiseExceptions = raises  # which the package changes for the whole process
        logging.getLogger("nixl").setLevel(logging.WARNING)  # or it prints lines for every agent
        raised = [v for v in vars(bindings).values() if isinstance(v, type)]
        return _Nixl(
            make_agent=interface.nixl_agent,
            make_config=interface.nixl_agent_config,
            errors=tuple(error for error in raised if issubclass(error, Exception)),
        )
    raise NixlMissingError(problem)


class NixlAgent:
    """An agent over the blocks of one pool."""

    def __init__(self, name: str, memory: BlockMemory, options: Mapping[str, str]) -> None:
        """Start it; blocks for about 0.05 s, the first time in a process for 0.5 s.

        `options` are UCX's, without their prefix. OSError if UCX cannot start with them, ValueError
        if the blocks do not lie side by side.
        """
        nixl = _load()
        self._errors = nixl.errors
        self._memory = memoryview(memory.block(BlockId(0)))  # which keeps all of it mapped
        self.address = address_of(self._memory)
        self.num_blocks, self.bytes_per_block = memory.num_blocks, memory.bytes_per_block
        size = self.num_blocks * self.bytes_per_block
        last = memory.block(BlockId(self.num_blocks - 1))
        if address_of(last) + self.bytes_per_block != self.address + size:
            raise ValueError("the blocks of the pool do not lie side by side")
        # No progress thread: it takes half a core over TCP, idle; whoever holds the agent polls.
        config = nixl.make_config(enable_prog_thread=False, backends=[])
        self._agent: _Agent | None = nixl.make_agent(name, config)
        self._binding = weakref.ref(self._agent.agent)
        self._running: set[Read] = set()
        settings = ",".join(f"{option}={value}" for option, value in options.items())
        try:
            self._agent.create_backend("UCX", {"engine_config": settings} if settings else {})
            self._agent.register_memory([(self.address, size, 0, "")], "DRAM")
        except self._errors as error:
            raise OSError(
                f"UCX does not start with {settings or 'its defaults'}: {error}"
            ) from error

    def metadata(self) -> bytes:
        """What another agent must know to read from this one."""
        return self._live().get_agent_metadata()

    def add(self, metadata: bytes) -> str:
        """Make another agent known; its name. ValueError if that is not an agent's metadata."""
        try:
            name = self._live().add_remote_agent(metadata)
        except self._errors as error:
            raise ValueError(f"not the metadata of an agent: {error}") from error
        return name if isinstance(name, str) else name.decode()

    def read(self, peer: str, remote: Sequence[Descriptor], local: Sequence[Descriptor]) -> Read:
        """Begin to copy remote memory into local memory, piece by piece.

        Within one host that may be over when it returns. Never raises for what the peer does: the
        READ has failed then.
        """
        agent = self._live()
        try:
            handle = agent.initialize_xfer(
                "READ",
                agent.get_xfer_descs(local, "DRAM"),
                agent.get_xfer_descs(remote, "DRAM"),
                peer,
            )
        except self._errors:  # nothing was begun
            return Read(None, ReadState.FAILED)
        read = Read(handle, ReadState.RUNNING)
        self._running.add(read)
        try:
            self._note(read, agent.transfer(handle))
        except self._errors:
            read.state = ReadState.FAILED
        return read

    def progress(self, read: Read) -> ReadState:
        """Do what there is to do, and say how far a READ is now."""
        if read.state is ReadState.RUNNING:
            try:
                self._note(read, self._live().check_xfer_state(read.handle))
            except self._errors:  # such as REMOTE_DISCONNECT
                read.state = ReadState.FAILED
        return read.state

    def poll(self) -> None:
        """Do what others' READs need of this process; OSError if UCX fails at it."""
        try:
            self._live().get_new_notifs()
        except self._errors as error:
            raise OSError(f"UCX has failed: {error}") from error

    def close(self) -> None:
        """End the agent: no READ writes, and none is served, once it has returned. The fence.

        Takes up to 0.1 s. RuntimeError if the agent lives on, in which case nothing may be reused.
        """
        if self._agent is not None:
            for read in self._running:
                self._release(read)
            self._running.clear()
            self._agent = None
        if self._binding() is not None:
            gc.collect()  # a failure's traceback may be in a cycle with it
        if self._binding() is not None:
            raise RuntimeError("INV-FENCE: an agent that was to end is still referred to")
        self._memory.release()

    def _note(self, read: Read, state: str) -> None:
        if state == "DONE":
            read.state = ReadState.DONE
            self._running.discard(read)
            self._release(read)
        elif state != "PROC":
            read.state = ReadState.FAILED

    def _release(self, read: Read) -> None:
        """Drop the handle, which refers to the agent; what it says about that does not matter."""
        with contextlib.suppress(*self._errors):
            self._live().release_xfer_handle(read.handle)
        read.handle = None

    def _live(self) -> _Agent:
        if self._agent is None:
            raise RuntimeError("the agent has ended")
        return self._agent


def address_of(view: memoryview) -> int:
    """Where a writable view begins in this process."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
