"""What prefill and decode say to each other about a hand-off: frozen values, no behaviour.

Every message names the transfer by `TransferKey`, so that a retry (epoch) or a restarted process
(incarnation) can never be mistaken for the attempt that a message belonged to.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kv_transfer.geometry import BlockId, KVLayout, LogicalBlock
from kv_transfer.logprobs import TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerInfo:
    """One worker process, as its peers must know it before they exchange a byte of KV."""

    worker_id: str
    """Stable name for people and metrics, e.g. `prefill-0`."""
    incarnation: str
    """New for every process start (uuid hex): a restart under the same address is another peer."""
    fingerprint: str
    """`KVLayout.fingerprint` of the pool: says whether two layouts are one, and not why not."""
    content_fingerprint: str
    """`KVLayout.content_fingerprint`: equal where blocks hold the same numbers, if elsewhere."""
    model_digest: str
    dtype: str
    num_layers: int
    num_kv_heads: int
    """In this pool."""
    head_dim: int
    block_size: int
    bytes_per_block: int
    layers_per_block: int
    """Of num_layers: each group of layers has blocks of its own."""
    tp_size: int
    tp_rank: int
    """Which of tp_size equal runs of the model's KV heads this pool has."""
    max_model_len: int
    """The window, in tokens."""
    pool_tokens: int
    """Tokens that the whole pool holds; never below max_model_len (INV-POOL-WINDOW)."""
    host: str = ""
    """Processes with the same value can share memory (`sharing_domain`); empty is not known."""
    gpu: str = ""
    """The GPU on which the pool lies, as it is called in every process; empty for host memory."""
    endpoints: tuple[tuple[str, str], ...] = ()
    """(transport name, address) pairs at which blocks can be fetched; empty on a pure receiver."""

    @staticmethod
    def of(
        layout: KVLayout,
        *,
        worker_id: str,
        incarnation: str,
        max_model_len: int,
        pool_tokens: int,
        host: str = "",
        gpu: str = "",
    ) -> PeerInfo:
        """A worker whose pool has this layout, before it offers anything."""
        return PeerInfo(
            worker_id=worker_id,
            incarnation=incarnation,
            fingerprint=layout.fingerprint,
            content_fingerprint=layout.content_fingerprint,
            model_digest=layout.model_digest,
            dtype=layout.dtype,
            num_layers=layout.num_layers,
            num_kv_heads=layout.num_kv_heads,
            head_dim=layout.head_dim,
            block_size=layout.block_size,
            bytes_per_block=layout.bytes_per_block,
            layers_per_block=layout.layers_per_block,
            tp_size=layout.tp_size,
            tp_rank=layout.tp_rank,
            max_model_len=max_model_len,
            pool_tokens=pool_tokens,
            host=host,
            gpu=gpu,
        )

    def endpoint(self, transport: str) -> str | None:
        """Address for a transport, or None if the worker does not offer it."""
        return dict(self.endpoints).get(transport)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferKey:
    """Identity of one attempt to move one sequence's KV from one process to another."""

    transfer_id: str
    """Made by the decode worker (uuid hex), never taken from a client."""
    epoch: int
    """Grows with every attempt of the same request; a lower one is refused."""
    prefill_incarnation: str
    decode_incarnation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantedBlock:
    """One finished block that decode may read while the lease lives."""

    logical: LogicalBlock
    block_id: BlockId
    generation: int
    """Of the block at grant time; freeing bumps it, which makes the transfer INVALID (INV-GEN)."""
    valid_tokens: int
    """Tokens with KV in it: block_size for all but the last block of the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken:
    """What prefill sampled at the end of the prompt; travels in the last grant."""

    token_id: int
    num_hit_tokens: int = 0
    """Prompt tokens that prefill found in its cache rather than computed."""
    logprobs: TokenLogprobs | None = None
    """Where the request asks for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """Blocks that became final since the grant before; `first` is set on the last one only."""

    sequence_number: int
    """0, 1, 2 ... within the transfer: a lost or repeated grant shows."""
    blocks: tuple[GrantedBlock, ...]
    first: FirstToken | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Of prompt tokens, where the request asks for them: joined over all grants, of every one but
    the first, which nothing predicts."""

    @property
    def is_last(self) -> bool:
        """Whether the whole prompt is granted with this one."""
        return self.first is not None


class Verdict(Enum):
    """The owner's answer to confirm: were all granted blocks untouched until now?"""

    VALID = "valid"
    INVALID = "invalid"


class ReleaseReason(Enum):
    """Why prefill's pins of a transfer ended."""

    CONFIRMED = "confirmed"
    RELEASED = "released"
    EXPIRED = "expired"
    REVOKED = "revoked"
    PEER_LOST = "peer_lost"
