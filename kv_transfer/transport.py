"""The seam that every way of moving blocks implements, and the errors that all of them raise.

    TransferError
    +-- LinkRefusedError       the two workers may not exchange KV: both values are named
    |   +-- NotAuthenticatedError  one of them has not proved that it knows the deployment's secret
    +-- PeerLostError          the peer died, hung or closed the connection
    +-- TransferDeadlineError  a phase took longer than its deadline
    +-- LeaseLostError         the lease expired or was revoked; what was read is not to be used
    +-- CorruptTransferError   a frame was short, misplaced, or its digest was wrong
    +-- InvalidTransferError   confirm answered INVALID

A receiver that gets any of them must treat the destination blocks as still written to until
`wait_quiesced` has returned (INV-FENCE).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from kv_transfer.geometry import BlockId, LogicalBlock
from kv_transfer.handoff import (
    FirstToken,
    Grant,
    GrantedBlock,
    PeerInfo,
    ReleaseReason,
    TransferKey,
    Verdict,
)
from kv_transfer.logprobs import TokenLogprobs
from kv_transfer.shared_memory import SharedRegion


class TransferError(Exception):
    """A hand-off did not happen; nothing of it may be used."""


class LinkRefusedError(TransferError):
    """The workers' pools are not compatible, or they are not who they say they are."""


class NotAuthenticatedError(LinkRefusedError):
    """The other end has not proved that it belongs to this deployment, or who it is."""


class PeerLostError(TransferError):
    """The other side is gone."""


class TransferDeadlineError(TransferError):
    """A phase of the transfer ran past its deadline."""


class LeaseLostError(TransferError):
    """The prefill side no longer guarantees the blocks."""


class CorruptTransferError(TransferError):
    """Bytes arrived that are not what was granted."""


class InvalidTransferError(TransferError):
    """The owner says that the blocks changed while they were read."""


MemoryKind = Literal["host", "cuda"]
"""Where a pool lies: `host` memory has an address in this process, `cuda` memory has none."""

DataPath = Literal["host", "authenticated", "encrypted", "open"]
"""Who can get at a transport's blocks on their way: `host` is processes of the same user that were
let in; `authenticated`, on a network that can be read, who proved to know the secret when it
connected; `encrypted` the same, and nobody can read or change them; `open` whoever reaches the
sockets of a library that asks for no proof."""


Gpus = Literal["any", "one", "two"]
"""`one` is the same GPU for both pools, `two` is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a transport can and cannot do.

    Links are chosen by where it reaches and which memory it moves, `auto` by its data path. `baton
    check` says all of it, for who runs it.
    """

    one_sided: bool
    """Whether the reader takes blocks out of their owner's memory by itself, once it is told that
    they are there and what they digest to; else the owner sends them."""
    peer_must_poll: bool
    """Whether a transfer stands still while the owner's process does."""
    fence: Literal["on_close", "on_abort", "on_agent_restart"]
    """What must have happened before destination blocks of a failed transfer are safe to reuse."""
    memory_kinds: frozenset[MemoryKind]
    """Of the pools that it reads from and writes to."""
    cross_host: bool
    data_path: DataPath
    gpus: Gpus = "any"
    """On which GPUs two pools must lie."""


class BlockMemory(Protocol):
    """The bytes of a pool, seen as blocks; the arena implements it."""

    @property
    def bytes_per_block(self) -> int:
        """Size of every block."""

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""

    @property
    def kind(self) -> MemoryKind:
        """Where they are; in any but host memory, `block` has nothing to show."""

    @property
    def region(self) -> SharedRegion | None:
        """What other processes may map: block i begins at i * bytes_per_block. None: nothing."""

    def block(self, block_id: BlockId) -> memoryview:
        """A writable, contiguous, byte-typed view of one block; no copy.

        TypeError where there is none.
        """


class GrantAuthority(Protocol):
    """The owner's side of every live transfer, asked by a transport's server.

    All calls come from the transfer thread. A refused request raises a `TransferError` whose text
    goes to the peer.
    """

    def attach(self, key: TransferKey, peer: PeerInfo, transport: str) -> None:
        """A receiver has connected for this transfer, over the transport of this name.

        Refused if the transfer is unknown or stale, or the workers do not fit each other.
        """

    def grants(self, key: TransferKey) -> AsyncIterator[Grant]:
        """The transfer's grants from the first on; ends after the last one, raises if revoked."""

    def authorize(self, key: TransferKey, blocks: Sequence[GrantedBlock]) -> None:
        """Every block must be part of a live grant with this generation."""

    def renew(self, key: TransferKey) -> None:
        """Start the lease anew; refused once it has expired."""

    def confirm(self, key: TransferKey) -> Verdict:
        """VALID only if the lease was held without a gap and no generation moved."""

    def release(self, key: TransferKey, reason: ReleaseReason) -> None:
        """The receiver needs the blocks no more; safe to repeat."""

    def note_stranger(self) -> None:
        """A connection ended before it had proved that it belongs to this deployment."""


class BlockServer(Protocol):
    """The prefill worker's end of a transport: answers fetches of granted blocks."""

    async def start(self) -> str:
        """Listen; returns the address that goes into `PeerInfo.endpoints`."""

    async def close(self) -> None:
        """Stop listening and drop every connection."""


class FetchSession(Protocol):
    """The decode worker's end of one transfer on one transport."""

    def grants(self) -> AsyncIterator[Grant]:
        """Grants as the owner extends them; ends after the last one."""

    def fetch(
        self, blocks: Sequence[GrantedBlock], placement: Mapping[LogicalBlock, BlockId]
    ) -> AsyncIterator[GrantedBlock]:
        """Read blocks into their places; yields each once its bytes have landed and verified."""

    async def renew(self) -> None:
        """Extend the lease."""

    async def confirm(self) -> Verdict:
        """Ask whether everything granted is still what was granted."""

    async def release(self) -> None:
        """Tell the owner that its blocks are not needed any more."""

    async def close(self) -> None:
        """Give up; returns only after the fence: no byte lands in the destination any more."""


class Transport(Protocol):
    """One way of moving blocks."""

    name: str
    capabilities: Capabilities

    def server(self, memory: BlockMemory, authority: GrantAuthority, me: PeerInfo) -> BlockServer:
        """A server for the blocks of a prefill worker."""

    async def connect(
        self, memory: BlockMemory, peer: PeerInfo, key: TransferKey, me: PeerInfo
    ) -> FetchSession:
        """Open a session for one transfer; raises `LinkRefusedError` or `PeerLostError`."""

    async def close(self) -> None:
        """Drop what is kept of peers between sessions; on the loop that opened them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Landed:
    """A hand-off whose coverage is full and whose confirm was VALID, from every source."""

    first: FirstToken
    """Of the first source, as are the log-probabilities."""
    prompt_logprobs: tuple[TokenLogprobs, ...]
    """Of all grants, in order."""
    num_tokens: int
    first_tokens: tuple[int, ...]
    """By group, the first token that has KV in the blocks that were brought. It is the first one of
    a block, but behind a sliding window where the sources' blocks are of another size."""
    num_blocks: int
    """That were fetched: of the sources' sizes, from all of them together."""
    moved: Mapping[str, int]
    """Bytes by transport."""
    fetch_s: float
    """From opening the sessions to the last VALID."""
    wait_s: float
    """From the last grant to the last VALID: what the hand-off adds after the last chunk."""

    @property
    def num_bytes(self) -> int:
        """Bytes that were moved."""
        return sum(self.moved.values())


Clock = Callable[[], float]
"""Monotonic seconds."""
