"""Paged attention with what torch brings along, wherever the pool lies.

Written for CPUs; on a GPU it was not run so far. Measured with SmolLM2-135M's shapes on Zen 3
(`tests/bench/bench_runner.py`), and what follows:

- Gathering whole blocks by one index into reused memory runs at memory speed; fresh memory costs
  more in page faults than the copy itself.
- Packing a kv head's query heads as its queries needs no copy of keys and values per query head.
- 16 decode rows in one padded call take two thirds of the time of 16 calls at 128 tokens, and half
  as much more at 1024, where the gathered keys have left the cache before they are read: rows of
  about the same length attend together, as many as fit.
- A prompt from its first token on needs no gather and no mask: its keys and values are at hand.

Layers of one group have their tokens in the same blocks, so that one index serves them all; behind
a sliding window the tables begin with what is seen, and no more is gathered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypedDict

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from workers.engine.attention.backend import GroupMetadata, IntArray, LayerScoring, StepMetadata
from workers.engine.attention.masked import causal_bias, masked_attention
from workers.engine.kv_cache import KVCache

__all__ = ["TorchBackend"]

_MAX_PADDING = 64
"""Tokens; attending over more of them in vain costs more than a call of its own."""
_MAX_GATHER_BYTES = 4 * 2**20
"""Keys and values that are still in a core's cache when attention comes to them."""


class _WrittenOut(TypedDict):
    scale: float
    softcap: float | None
    sinks: torch.Tensor | None


class _Gather(NamedTuple):
    """Where a part of a step finds what its sequences hold, layer by layer.

    `run` is scratch memory that the next gather overwrites; `keys` and `values`
    `[sequences, kv_heads, tokens, head_dim]` are views of it, made once for all layers.
    """

    blocks: torch.Tensor
    """Rows of the cache's `block_rows`, of any layer: all K blocks, then all V blocks."""
    run: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    padding: tuple[torch.Tensor, torch.Tensor] | None
    """The run by tokens, and those of its rows that lie behind their sequence's end."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Decodes:
    """Rows of one token each, of about the same length, that attend in one call."""

    rows: slice | torch.Tensor
    """Of the step."""
    seq_lens: tuple[int, ...]
    max_len: int
    gather: _Gather
    biases: dict[int | None, torch.Tensor | None] = field(default_factory=dict)
    """By window; made on first use, then shared by the layers."""

    def bias(self, scoring: LayerScoring, q: torch.Tensor) -> torch.Tensor | None:
        """Where q is, `[rows, 1, 1, max_len]`: -inf at what is not seen; None where all is."""
        window = scoring.sliding_window if scoring.hides_tokens(self.max_len) else None
        if window not in self.biases:
            self.biases[window] = _decode_bias(self.seq_lens, self.max_len, window, q)
        return self.biases[window]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Chunk:
    """Several rows of one sequence."""

    rows: slice
    seq_len: int
    gather: _Gather | None
    """None if all of the sequence's tokens are in this step."""
    biases: dict[int | None, torch.Tensor] = field(default_factory=dict)
    """By window; made on first use, then shared by the layers."""

    @property
    def query_length(self) -> int:
        return int(self.rows.stop - self.rows.start)

    def bias(self, scoring: LayerScoring, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """What to add to the scores `[query_length, seq_len]`."""
        window = scoring.sliding_window if scoring.hides_tokens(self.seq_len) else None
        if window not in self.biases:
            self.biases[window] = causal_bias(
                self.query_length, self.seq_len, window, dtype=dtype, device=device
            )
        return self.biases[window]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Prepared:
    """What the layers of one group do in a step."""

    writes: torch.Tensor
    """Rows of the cache's `token_rows`, of any of the layers: where the step's K and V go."""
    decodes: tuple[_Decodes, ...]
    chunks: tuple[_Chunk, ...]


class TorchBackend:
    """`AttentionBackend` over one `KVCache`, on its device; used by one thread at a time."""

    def __init__(self, kv_cache: KVCache, *, max_gather_bytes: int = _MAX_GATHER_BYTES) -> None:
        """Attend over this cache, gathering at most about max_gather_bytes for several rows."""
        self._cache = kv_cache
        self._layout = kv_cache.layout
        self._scratch = kv_cache.block_rows[0].new_empty(0, kv_cache.block_rows[0].shape[1])
        self._max_gather_tokens = max_gather_bytes // self._layout.bytes_per_layer_token
        self._group_of = {
            layer: index
            for index, group in enumerate(self._layout.groups)
            for layer in group.layers
        }
        self._prepared: tuple[_Prepared, ...] = ()

    def prepare(self, meta: StepMetadata) -> None:
        """Work out the step's index tensors and views, for all layers of a group at once.

        ValueError if the step has tables for another number of groups.
        """
        if len(meta.groups) != len(self._layout.groups):
            raise ValueError(
                f"the step has block tables for {len(meta.groups)} groups of layers, the KV "
                f"layout has {len(self._layout.groups)}"
            )
        self._prepared = tuple(self._prepare(meta.cu_seqlens_q, group) for group in meta.groups)

    def _prepare(self, cu_seqlens_q: IntArray, group: GroupMetadata) -> _Prepared:
        lengths = np.diff(cu_seqlens_q)
        decodes = np.flatnonzero(lengths == 1)
        return _Prepared(
            writes=self._cache.token_index(group.slot_mapping),
            decodes=tuple(
                self._decodes(cu_seqlens_q, group, members)
                for members in _alike(group.seq_lens, decodes, self._max_gather_tokens)
            ),
            chunks=tuple(
                self._chunk(cu_seqlens_q, group, int(i)) for i in np.flatnonzero(lengths > 1)
            ),
        )

    def forward(
        self,
        layer_index: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scoring: LayerScoring,
    ) -> torch.Tensor:
        """See `AttentionBackend.forward`."""
        key_rows, value_rows = self._cache.token_rows[layer_index]
        prepared = self._prepared[self._group_of[layer_index]]
        key_rows.index_copy_(0, prepared.writes, k)
        value_rows.index_copy_(0, prepared.writes, v)
        if not prepared.chunks and len(prepared.decodes) == 1:
            return self._decode(layer_index, prepared.decodes[0], q, scoring)
        if not prepared.decodes and len(prepared.chunks) == 1:
            return self._extend(layer_index, prepared.chunks[0], (q, k, v), scoring)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for decodes in prepared.decodes:
            out[decodes.rows] = self._decode(layer_index, decodes, q[decodes.rows], scoring)
        for chunk in prepared.chunks:
            out[chunk.rows] = self._extend(layer_index, chunk, (q, k, v), scoring)
        return out

    def _decode(
        self, layer_index: int, decodes: _Decodes, q: torch.Tensor, scoring: LayerScoring
    ) -> torch.Tensor:
        keys, values = self._fetch(decodes.gather, layer_index)
        if _needs_written_out(scoring):
            return _attend_rows(decodes.seq_lens, q, keys, values, scoring)
        packed = q.reshape(len(q), self._layout.num_kv_heads, -1, self._layout.head_dim)
        attended = scaled_dot_product_attention(
            packed, keys, values, attn_mask=decodes.bias(scoring, q), scale=scoring.scale
        )
        return attended.reshape(q.shape)

    def _extend(
        self,
        layer_index: int,
        chunk: _Chunk,
        qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        scoring: LayerScoring,
    ) -> torch.Tensor:
        q, keys, values = (part[chunk.rows].transpose(0, 1).unsqueeze(0) for part in qkv)
        if chunk.gather is not None:
            keys, values = self._fetch(chunk.gather, layer_index)
        if _needs_written_out(scoring):
            bias = chunk.bias(scoring, torch.float32, q.device)
            attended = masked_attention(q[0], keys[0], values[0], bias, **_written_out(scoring))
            return attended.transpose(0, 1)
        is_plain = chunk.gather is None and not scoring.hides_tokens(chunk.seq_len)
        attended = scaled_dot_product_attention(
            q,
            keys,
            values,
            attn_mask=None if is_plain else chunk.bias(scoring, q.dtype, q.device),
            is_causal=is_plain,
            scale=scoring.scale,
            enable_gqa=True,
        )
        return attended[0].transpose(0, 1)

    def _fetch(self, gather: _Gather, layer_index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's keys and values, good until the next fetch."""
        torch.index_select(self._cache.block_rows[layer_index], 0, gather.blocks, out=gather.run)
        if gather.padding is not None:
            # 0 * NaN is NaN: what lies behind a sequence's end must be finite, though masked.
            tokens, behind = gather.padding
            tokens.index_fill_(0, behind, 0)
        return gather.keys, gather.values

    def _decodes(self, cu_seqlens_q: IntArray, group: GroupMetadata, members: IntArray) -> _Decodes:
        seq_lens = group.seq_lens[members]
        rows = cu_seqlens_q[members]
        is_run = bool((np.diff(rows) == 1).all())
        return _Decodes(
            rows=slice(int(rows[0]), int(rows[-1]) + 1) if is_run else self._cache.on_device(rows),
            seq_lens=tuple(seq_lens.tolist()),
            max_len=int(seq_lens.max()),
            gather=self._gather([group.block_tables[i] for i in members], seq_lens),
        )

    def _chunk(self, cu_seqlens_q: IntArray, group: GroupMetadata, i: int) -> _Chunk:
        rows = slice(int(cu_seqlens_q[i]), int(cu_seqlens_q[i + 1]))
        seq_len = int(group.seq_lens[i])
        is_whole = seq_len == rows.stop - rows.start
        gather = None
        if not is_whole:
            gather = self._gather([group.block_tables[i]], group.seq_lens[i : i + 1])
        return _Chunk(rows=rows, seq_len=seq_len, gather=gather)

    def _gather(self, tables: Sequence[IntArray], seq_lens: IntArray) -> _Gather:
        width = max(len(table) for table in tables)
        padded = np.stack([np.resize(table, width) for table in tables])
        run = self._reserve(2 * padded.size)
        layout = self._layout
        shape = (2, len(tables), width * layout.block_size, layout.num_kv_heads, layout.head_dim)
        keys, values = run.view(shape)[:, :, : int(seq_lens.max())].transpose(2, 3).unbind(0)
        padding = None
        if (seq_lens != seq_lens[0]).any():
            behind = np.flatnonzero(np.arange(shape[2]) >= seq_lens[:, None])
            behind = np.concatenate([behind, behind + len(tables) * shape[2]])
            padding = (run.view(-1, *shape[3:]), self._cache.on_device(behind))
        blocks = self._cache.block_index(padded).flatten()
        return _Gather(blocks=blocks, run=run, keys=keys, values=values, padding=padding)

    def _reserve(self, num_blocks: int) -> torch.Tensor:
        """The first rows of the scratch memory, which grows to the largest gather ever asked for.

        Parts of a step take turns in it; one that was prepared before it grew keeps its old memory.
        """
        if len(self._scratch) < num_blocks:
            self._scratch = self._scratch.new_empty(num_blocks, self._scratch.shape[1])
        return self._scratch[:num_blocks]


def _decode_bias(
    seq_lens: Sequence[int], max_len: int, window: int | None, q: torch.Tensor
) -> torch.Tensor | None:
    lengths = np.array(seq_lens)[:, None]
    tokens = np.arange(max_len)
    is_hidden = tokens >= lengths  # padding
    if window is not None:
        is_hidden |= tokens < lengths - window
    if not is_hidden.any():
        return None
    bias = torch.zeros(is_hidden.shape, dtype=q.dtype).masked_fill_(
        torch.from_numpy(is_hidden), float("-inf")
    )
    return bias[:, None, None].to(q.device)


def _alike(seq_lens: IntArray, members: IntArray, max_tokens: int) -> Iterator[IntArray]:
    """Split sequences into groups of lengths within `_MAX_PADDING`, of up to max_tokens together.

    Padding counts as tokens; a sequence longer than max_tokens is a group of its own.
    """
    if len(members) == 1:
        yield members
        return
    if len(members) and np.ptp(seq_lens[members]) > _MAX_PADDING:
        members = members[np.argsort(seq_lens[members], kind="stable")]
    first = 0
    while first < len(members):
        lengths = seq_lens[members[first:]]
        longest = np.maximum.accumulate(lengths)
        fits = longest - np.minimum.accumulate(lengths) <= _MAX_PADDING
        fits &= longest * np.arange(1, len(lengths) + 1) <= max_tokens
        size = max(1, int(np.argmin(np.append(fits, False))))
        yield members[first : first + size]
        first += size


def _needs_written_out(scoring: LayerScoring) -> bool:
    """Whether torch's fused attention cannot do it."""
    return scoring.softcap is not None or scoring.sinks is not None


def _written_out(scoring: LayerScoring) -> _WrittenOut:
    """The keyword arguments of `masked_attention`."""
    return {"scale": scoring.scale, "softcap": scoring.softcap, "sinks": scoring.sinks}


def _attend_rows(
    seq_lens: Sequence[int],
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scoring: LayerScoring,
) -> torch.Tensor:
    """One row of each sequence over the tokens that its window shows, one sequence at a time."""
    attended = []
    for row, seq_len in enumerate(seq_lens):
        window = scoring.sliding_window
        first = max(0, seq_len - window) if window is not None else 0
        seen = slice(first, seq_len)
        attended.append(
            masked_attention(
                q[row].unsqueeze(1),
                keys[row, :, seen],
                values[row, :, seen],
                None,
                **_written_out(scoring),
            ).squeeze(1)
        )
    return torch.stack(attended)
