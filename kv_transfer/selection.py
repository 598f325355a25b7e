"""Which transport a link uses, and why: one rule, asked by the worker that pulls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from kv_transfer.handoff import PeerInfo
from kv_transfer.transport import Capabilities, Gpus, LinkRefusedError, MemoryKind, Transport

__all__ = ["Choice", "LinkReason", "Offer", "check_memory", "choose"]


class LinkReason(Enum):
    """Why a link uses the transport that it uses."""

    ONLY_ONE = "only_one"
    """The settings leave no choice."""
    SAME_HOST = "same_host"
    """The best there is, and both workers are where it reaches."""
    OTHER_HOST = "other_host"
    """A better one does not reach from one worker's host to the other's."""
    UNKNOWN_HOST = "unknown_host"
    """A better one needs one host, and a worker cannot tell on which it is."""
    NOT_OFFERED = "not_offered"
    """A better one is not offered by the peer: its memory cannot be shared."""
    OTHER_MEMORY = "other_memory"
    """A better one does not move blocks of memory of this kind."""
    SAME_GPU = "same_gpu"
    """The best there is, and both pools lie on the GPU that it needs for both."""
    OTHER_GPU = "other_gpu"
    """A better one does not reach from one GPU to another."""
    ONE_GPU = "one_gpu"
    """A better one needs two GPUs, and both pools lie on the same one."""
    BROKEN = "broken"
    """A better one does not start on this worker's host."""
    BEST = "best"
    """The best there is; it reaches everywhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A transport that this worker could use, or should be able to."""

    name: str
    cross_host: bool
    memory_kinds: frozenset[MemoryKind] = frozenset({"host"})
    gpus: Gpus = "any"
    is_broken: bool = False
    """It is wanted, and does not start here."""

    @classmethod
    def of(cls, transport: Transport) -> Offer:
        """One that works."""
        return cls.by(transport.name, transport.capabilities)

    @classmethod
    def by(cls, name: str, abilities: Capabilities, *, is_broken: bool = False) -> Offer:
        """A transport of this name that can, or could, do this."""
        return cls(
            name=name,
            cross_host=abilities.cross_host,
            memory_kinds=abilities.memory_kinds,
            gpus=abilities.gpus,
            is_broken=is_broken,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The transport of one link."""

    transport: str
    reason: LinkReason


def choose(
    offers: Sequence[Offer], me: PeerInfo, peer: PeerInfo, memory: MemoryKind = "host"
) -> Choice:
    """The first of `offers`, best first, that the peer has too, that reaches it and this `memory`.

    Raises `LinkRefusedError` if there is none; it names both hosts where they are the obstacle.
    """
    check_memory(offers, memory)
    obstacles: list[LinkReason] = []
    for offer in offers:
        obstacle = _obstacle(offer, me, peer, memory)
        if obstacle is None:
            return Choice(transport=offer.name, reason=_reason(offers, offer, obstacles))
        obstacles.append(obstacle)
    names = [offer.name for offer in offers if not offer.is_broken]
    if not {LinkReason.OTHER_HOST, LinkReason.UNKNOWN_HOST}.isdisjoint(obstacles):
        raise LinkRefusedError(
            f"transport {' or '.join(names)} needs one host: {peer.worker_id} is on "
            f"{peer.host or 'an unknown one'}, {me.worker_id} on {me.host or 'an unknown one'}"
        )
    if not {LinkReason.OTHER_GPU, LinkReason.ONE_GPU}.isdisjoint(obstacles):
        raise LinkRefusedError(
            f"transport {' or '.join(names)} does not reach from GPU {peer.gpu} of "
            f"{peer.worker_id} to GPU {me.gpu} of {me.worker_id}"
        )
    raise LinkRefusedError(
        f"no common transport: {peer.worker_id} offers {sorted(dict(peer.endpoints))}, "
        f"{me.worker_id} has {names}"
    )


def check_memory(offers: Sequence[Offer], memory: MemoryKind) -> None:
    """Refuse a pool that no transport moves blocks of: `LinkRefusedError`."""
    if not any(memory in offer.memory_kinds for offer in offers):
        names = " or ".join(offer.name for offer in offers)
        raise LinkRefusedError(
            f"transport {names} moves no blocks of a pool in {memory} memory; put the pool in host "
            "memory"
        )


def _obstacle(offer: Offer, me: PeerInfo, peer: PeerInfo, memory: MemoryKind) -> LinkReason | None:
    if memory not in offer.memory_kinds:
        return LinkReason.OTHER_MEMORY
    if offer.is_broken:
        return LinkReason.BROKEN
    if peer.endpoint(offer.name) is None:
        return LinkReason.NOT_OFFERED
    if offer.cross_host:
        return _gpu_obstacle(offer, me, peer)
    if not me.host or not peer.host:
        return LinkReason.UNKNOWN_HOST
    return _gpu_obstacle(offer, me, peer) if me.host == peer.host else LinkReason.OTHER_HOST


def _gpu_obstacle(offer: Offer, me: PeerInfo, peer: PeerInfo) -> LinkReason | None:
    is_one = me.gpu == peer.gpu
    if offer.gpus == "one" and not is_one:
        return LinkReason.OTHER_GPU
    return LinkReason.ONE_GPU if offer.gpus == "two" and is_one else None


def _reason(offers: Sequence[Offer], chosen: Offer, obstacles: Sequence[LinkReason]) -> LinkReason:
    if len(offers) == 1:
        return LinkReason.ONLY_ONE
    if obstacles:
        return obstacles[-1]  # of the next best one
    if chosen.gpus == "one":
        return LinkReason.SAME_GPU
    return LinkReason.BEST if chosen.cross_host else LinkReason.SAME_HOST
