"""Which full blocks hold the KV of which text, and in which order they may be given up.

A block is named by a key of 128 bits that depends on the model and its KV layout, on the
tenant's salt, and on every token up to the block's end: equal keys are equal KV, and no key of
one salt is a key of another (INV-SALT). Tenants choose the text, so the hash is a cryptographic
one. The cache names blocks and orders them; `BlockPool` owns their states and counts holders.

Chained hashes of full blocks are the way of vLLM's prefix cache, and so is the order: least
recently used first, and of one sequence the last block first. In a group of layers that see
everything, whoever holds a block holds those before it in its chain and gives them up after it,
so that in this one order a parent always comes after its children, and nobody is left behind a
block that is gone.

Behind a sliding window a block is of use without those before it: whoever goes on from the end
of some block looks at the last few up to there. So sequences give up the blocks behind their
window one by one, each goes when it is its turn, and what was given up long ago goes before the
ends of texts, from which conversations go on. What can be of no use any more goes at once: a
block is looked at from the boundaries that its window reaches, and from none of them without the
block of the same tokens in each group that sees as far or farther. So a block that is evicted
takes with it those of the same key in the groups that see no farther; and what can be found in
a group can be found in every one that sees farther.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NewType

from kv_transfer.geometry import BlockId

BlockKey = NewType("BlockKey", bytes)
"""Names a full block's KV; 16 bytes."""

_KEY_BYTES = 16
_ROOT = b"baton-kv-root"
_BLOCK = b"baton-kv-block"
"""What is hashed, so that a root can never be a block's key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixScope:
    """What all keys of a worker's cache have in common."""

    fingerprint: str
    """`KVLayout.fingerprint`: the model, its weights and the layout of a block."""
    block_size: int

    def chain(self, salt: str) -> KeyChain:
        """The keys of a sequence under a tenant's salt; "" is shared by all that give none."""
        digest = hashlib.blake2b(
            salt.encode(),
            digest_size=_KEY_BYTES,
            key=self.fingerprint.encode(),
            person=_ROOT,
        ).digest()
        return KeyChain(BlockKey(digest), self.block_size)


class KeyChain:
    """The keys of one sequence's full blocks, computed once, as far as they were asked for."""

    __slots__ = ("_block_size", "_pack", "_root", "keys")

    def __init__(self, root: BlockKey, block_size: int) -> None:
        self._root = root
        self._block_size = block_size
        self._pack = struct.Struct(f"<{block_size}q").pack
        self.keys: list[BlockKey] = []

    def extend(self, token_ids: Sequence[int], num_blocks: int) -> None:
        """Have keys for the first num_blocks blocks of the tokens, which must be full."""
        for index in range(len(self.keys), num_blocks):
            tokens = token_ids[index * self._block_size : (index + 1) * self._block_size]
            before = self.parent(index) or self._root
            digest = hashlib.blake2b(
                before + self._pack(*tokens), digest_size=_KEY_BYTES, person=_BLOCK
            ).digest()
            self.keys.append(BlockKey(digest))

    def parent(self, index: int) -> BlockKey | None:
        """The key of the block before; None for the first."""
        return self.keys[index - 1] if index > 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStored:
    """A block can be found under its key from now on."""

    key: BlockKey
    parent: BlockKey | None
    """The key of the block before it; None for the first."""
    group: int = 0
    """The group of layers whose KV is in the block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockEvicted:
    """A key's block is gone from a group."""

    key: BlockKey
    parent: BlockKey | None
    group: int = 0


CacheEvent = BlockStored | BlockEvicted


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheEvents:
    """What changed since the events before, oldest first."""

    events: tuple[CacheEvent, ...]
    num_lost: int
    """Older ones that nobody came for: whoever follows the cache must begin anew."""


class PrefixCache:
    """Keyed blocks: found by group and key, given up when their turn has come."""

    def __init__(self, *, sliding_windows: Sequence[int | None] = (None,)) -> None:
        """`sliding_windows` says of each group of layers how far back its tokens see."""
        self._forgets = tuple(window is not None for window in sliding_windows)
        reach = [math.inf if window is None else window for window in sliding_windows]
        self._going_along = tuple(
            tuple(group for group, other in enumerate(reach) if other <= own) for own in reach
        )
        """By group, those that see no farther, itself included."""
        self._entries: dict[BlockId, BlockStored] = {}
        self._blocks: tuple[dict[BlockKey, BlockId], ...] = tuple({} for _ in sliding_windows)
        self._idle: OrderedDict[BlockId, None] = OrderedDict()
        """Keyed blocks that nobody holds; the first is given up first."""
        self._events: deque[CacheEvent] = deque(maxlen=0)
        self._num_lost = 0
        self.num_stored = 0
        """Blocks that were given a key so far."""
        self.num_evicted = 0
        """Blocks given up so far."""

    @property
    def num_idle(self) -> int:
        """Keyed blocks that nobody holds."""
        return len(self._idle)

    @property
    def has_full_group(self) -> bool:
        """Whether a key's block is there as long as anything that was computed from it."""
        return not all(self._forgets)

    def match(self, keys: Sequence[BlockKey], *, group: int = 0) -> tuple[BlockId, ...]:
        """A group's blocks of the longest run of keys, from the first on, that are all there."""
        blocks, block_ids = self._blocks[group], []
        for key in keys:
            block_id = blocks.get(key)
            if block_id is None:
                break
            block_ids.append(block_id)
        return tuple(block_ids)

    def block_of(self, key: BlockKey, *, group: int = 0) -> BlockId | None:
        """The block that holds a key's KV in a group, or None."""
        return self._blocks[group].get(key)

    def is_keyed(self, block_id: BlockId) -> bool:
        """Whether a block can be found."""
        return block_id in self._entries

    def is_passed_by(self, block_id: BlockId) -> bool:
        """Whether a keyed block is one that its holders give up behind their window."""
        return self._forgets[self._entries[block_id].group]

    def store(
        self, block_id: BlockId, key: BlockKey, parent: BlockKey | None, *, group: int = 0
    ) -> None:
        """Name a held block by a new key; the caller holds the key's block where more is seen.

        And, in a group that sees everything, the parent's.
        """
        entry = BlockStored(key=key, parent=parent, group=group)
        self._entries[block_id] = entry
        self._blocks[group][key] = block_id
        self.num_stored += 1
        self._tell(entry)

    def let_go(self, block_id: BlockId) -> None:
        """Nobody holds a keyed block any more: it goes when the others have gone."""
        self._idle[block_id] = None

    def hold(self, block_id: BlockId) -> None:
        """Somebody holds an idle block again."""
        del self._idle[block_id]

    def evict(self) -> list[BlockId]:
        """Give up the idle block whose turn it is, and what is of no use without it.

        KeyError if none is idle.
        """
        oldest, _ = self._idle.popitem(last=False)
        entry = self._entries[oldest]
        found = (self._blocks[group].get(entry.key) for group in self._going_along[entry.group])
        evicted = [block_id for block_id in found if block_id is not None]
        for block_id in evicted:
            if block_id != oldest:
                del self._idle[block_id]
            self._drop(block_id)
        return evicted

    def forget(self, block_ids: Sequence[BlockId]) -> list[BlockId]:
        """Find these blocks no more, nor any that was computed from them; returns the idle ones.

        For KV that cannot be trusted. Looks at every entry; parents were stored before children.
        Where all groups forget, a parent may be gone before its children, and nothing tells what
        was computed from what: then all that is cached goes.
        """
        doomed = {self._entries[block_id].key for block_id in block_ids if self.is_keyed(block_id)}
        doomed_blocks = []
        for block_id, entry in self._entries.items():
            if not self.has_full_group or entry.key in doomed or entry.parent in doomed:
                doomed.add(entry.key)
                doomed_blocks.append(block_id)
        idle = [block_id for block_id in doomed_blocks if block_id in self._idle]
        for block_id in idle:
            del self._idle[block_id]
        for block_id in reversed(doomed_blocks):  # children first, for whoever follows the events
            self._drop(block_id)
        return idle

    def follow(self, *, max_events: int = 65_536) -> None:
        """Keep what is stored and evicted from now on for `take_events`, the last max_events.

        Until then nothing is kept: an event costs memory, and most caches are followed by nobody.
        """
        self._events = deque(maxlen=max_events)
        self._num_lost = 0

    def take_events(self) -> CacheEvents:
        """What was stored and evicted since the call before, or since `follow`."""
        taken = CacheEvents(events=tuple(self._events), num_lost=self._num_lost)
        self._events.clear()
        self._num_lost = 0
        return taken

    def check_invariants(self, *, idle: Sequence[BlockId]) -> None:
        """Raise AssertionError if the cache contradicts itself; `idle` must be its idle blocks."""
        assert sorted(self._idle) == sorted(idle), (
            f"INV-CONSERVE: blocks {sorted(self._idle)} are idle in the cache, {sorted(idle)} are"
        )
        for group, blocks in enumerate(self._blocks):
            keyed = {
                entry.key: block_id
                for block_id, entry in self._entries.items()
                if entry.group == group
            }
            assert keyed == blocks, "INV-SALT: a key leads to another block than it names"
            if not self._forgets[group]:
                self._check_parents(group, keyed)
        for block_id, entry in self._entries.items():
            self._check_those_that_see_farther(block_id, entry)

    def _check_parents(self, group: int, keyed: Mapping[BlockKey, BlockId]) -> None:
        """In a group that sees everything, nobody is left behind a block that is gone."""
        gone: set[BlockKey] = set()
        idle = [block_id for block_id in self._idle if self._entries[block_id].group == group]
        for block_id in idle:
            entry = self._entries[block_id]
            assert entry.parent not in gone, (
                f"INV-CONSERVE: block {block_id} would go after the block before it"
            )
            gone.add(entry.key)
        for block_id in keyed.values():
            entry = self._entries[block_id]
            assert entry.parent is None or entry.parent in keyed, (
                f"INV-CONSERVE: block {block_id} is left behind a block that is gone"
            )
            assert block_id in self._idle or entry.parent not in gone, (
                f"INV-CONSERVE: block {block_id} is held, the block before it is not"
            )

    def _check_those_that_see_farther(self, block_id: BlockId, entry: BlockStored) -> None:
        """A block is of use with the key's blocks in all groups that see as far or farther."""
        for group, going_along in enumerate(self._going_along):
            if entry.group in going_along:
                other = self._blocks[group].get(entry.key)
                assert other is not None, (
                    f"INV-CONSERVE: block {block_id} is left without its key's block in a group "
                    "that sees farther"
                )
                assert block_id in self._idle or other not in self._idle, (
                    f"INV-CONSERVE: block {block_id} is held, its key's block {other} in a group "
                    "that sees farther is not"
                )

    def _drop(self, block_id: BlockId) -> None:
        entry = self._entries.pop(block_id)
        del self._blocks[entry.group][entry.key]
        self.num_evicted += 1
        self._tell(BlockEvicted(key=entry.key, parent=entry.parent, group=entry.group))

    def _tell(self, event: CacheEvent) -> None:
        self._num_lost += len(self._events) == self._events.maxlen
        self._events.append(event)
