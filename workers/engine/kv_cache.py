"""The paged keys and values of one worker: slots in, keys and values out.

Owns the arena's memory and its index arithmetic, and nothing else: which block belongs to whom is
the block pool's business, what is done with keys and values the attention backend's. It never hands
out a copy.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch

from kv_transfer.geometry import BlockId, KVLayout
from kv_transfer.shared_memory import SharedRegion
from kv_transfer.transport import MemoryKind

__all__ = ["KVCache", "torch_dtype"]

IntArray = npt.NDArray[np.int64]


def torch_dtype(name: str) -> torch.dtype:
    """The element type that a layout's `dtype` names; ValueError if a KV cache cannot hold it."""
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in dtypes:
        raise ValueError(f"KV dtype {name!r} is not one of {sorted(dtypes)}")
    return dtypes[name]


class KVCache:
    """A block-major arena `[num_blocks, layers_per_block, 2, block_size, kv_heads, head_dim]`.

    A block belongs to whichever group of layers it was given to, and holds them in their order.
    The memory is reserved, not touched: pages that no token was written to cost nothing. Accesses
    go by one index into rows, because that runs at memory speed where several indices do not. The
    rows of a group's layers lie a constant apart; so each layer has views that start at its own
    first row, and one index, made once per step, serves all layers of a group:

    - `token_rows[layer_index]` is (K, V), each `[rows, kv_heads, head_dim]`, to be indexed by
      `token_index`: a row is one token's K or V,
    - `block_rows[layer_index]` is `[rows, block_size * kv_heads * head_dim]`, to be indexed by
      `block_index`: a row is one block's K or V.

    As `BlockMemory` it shows each block's bytes to the transports, on a GPU as `DeviceMemory`.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        device: str | torch.device = "cpu",
        *,
        poison: bool = False,
        region: SharedRegion | None = None,
    ) -> None:
        """Reserve num_blocks blocks; with `poison` every element is NaN until it is written.

        With a `region` they lie in that, which must have exactly their size, else in memory that no
        other process can see.
        """
        dtype = torch_dtype(layout.dtype)
        if dtype.itemsize != layout.element_bytes:
            raise ValueError(
                f"{dtype} has {dtype.itemsize} bytes, the layout says {layout.element_bytes}"
            )
        if num_blocks < 1:
            raise ValueError(f"a KV cache needs at least one block, not {num_blocks}")
        self.layout = layout
        self.dtype = dtype
        self.device = torch.device(device)
        shape = (
            num_blocks,
            layout.layers_per_block,
            2,
            layout.block_size,
            layout.num_kv_heads,
            layout.head_dim,
        )
        self.region = region
        self._arena = (
            torch.empty(shape, dtype=dtype, device=self.device)
            if region is None
            else self._in_region(region, num_blocks).view(shape)
        )
        tokens = self._arena.view(-1, layout.num_kv_heads, layout.head_dim)
        blocks = self._arena.view(num_blocks * layout.layers_per_block * 2, -1)
        size = layout.block_size
        places = {layer: i for group in layout.groups for i, layer in enumerate(group.layers)}
        self._places = tuple(places[layer] for layer in range(layout.num_layers))
        self.token_rows = tuple(
            (tokens[2 * i * size :], tokens[(2 * i + 1) * size :]) for i in self._places
        )
        self.block_rows = tuple(blocks[2 * i :] for i in self._places)
        self._bytes = self._host_bytes()
        if poison:
            self.poison(BlockId(block_id) for block_id in range(num_blocks))

    @property
    def kind(self) -> MemoryKind:
        """Where the blocks are, for transports."""
        return "host" if self._bytes is not None else "cuda"

    @property
    def bytes_per_block(self) -> int:
        """Size of every block."""
        return self.layout.bytes_per_block

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return self._arena.shape[0]

    def block(self, block_id: BlockId) -> memoryview:
        """The bytes of one block: writable, contiguous, no copy.

        TypeError if the arena is not in host memory, IndexError if there is no such block.
        """
        if self._bytes is None:
            raise TypeError(f"blocks on {self.device} have no host address")
        self._check_block(block_id)
        start = block_id * self.bytes_per_block
        return self._bytes[start : start + self.bytes_per_block]

    def tensor(self, block_id: BlockId) -> torch.Tensor:
        """The bytes of one block where they are: uint8 `[bytes_per_block]`, no copy.

        IndexError if there is no such block.
        """
        self._check_block(block_id)
        return self._arena[block_id].view(-1).view(torch.uint8)

    def layer(self, layer_index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of a layer's K and V, each `[num_blocks, block_size, kv_heads, head_dim]`.

        In blocks of other groups they show the layer that has the same place there.
        """
        place = self._places[layer_index]
        return self._arena[:, place, 0], self._arena[:, place, 1]

    def poison(self, block_ids: Iterable[BlockId]) -> None:
        """Fill blocks with NaN: a slot read before it is written then gives no plausible text."""
        for block_id in block_ids:
            self._check_block(block_id)
            self._arena[block_id] = float("nan")

    def token_index(self, slots: IntArray) -> torch.Tensor:
        """Rows of any of `token_rows` for slots: `[len(slots)]`."""
        block_size = self.layout.block_size
        # Between a block and the next lie the block's other layers and kinds.
        skipped = (self.layout.layers_per_block * 2 - 1) * block_size
        return self.on_device(slots + slots // block_size * skipped)

    def block_index(self, block_ids: IntArray) -> torch.Tensor:
        """Rows of any of `block_rows` for block ids: `[2 (K, V), *block_ids.shape]`."""
        rows = block_ids * (self.layout.layers_per_block * 2)
        return self.on_device(np.stack([rows, rows + 1]))

    def on_device(self, numbers: IntArray) -> torch.Tensor:
        """Numbers of a step where its tensors are: the arena's device."""
        return torch.from_numpy(numbers).to(self.device)

    def settle(self) -> None:
        """Return when all that steps have asked to be written is written.

        In host memory it is already; a GPU is asked, and does it later.
        """
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def _check_block(self, block_id: BlockId) -> None:
        if not 0 <= block_id < self.num_blocks:
            raise IndexError(f"block {block_id} is not one of the {self.num_blocks} blocks")

    def _in_region(self, region: SharedRegion, num_blocks: int) -> torch.Tensor:
        wanted = num_blocks * self.layout.bytes_per_block
        if self.device.type != "cpu" or region.size_bytes != wanted:
            raise ValueError(
                f"{wanted} bytes of KV on {self.device} cannot lie in a region of "
                f"{region.size_bytes} bytes of host memory"
            )
        return torch.frombuffer(region.buffer, dtype=self.dtype)

    def _host_bytes(self) -> memoryview | None:
        if self.device.type != "cpu":
            return None
        array: npt.NDArray[np.uint8] = self._arena.view(-1).view(torch.uint8).numpy()
        return array.data
