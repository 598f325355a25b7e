"""What process groups take of memory, by NCCL's documentation and sources."""

from __future__ import annotations

import pytest

from kv_transfer.transports.group_memory import GLOO_BYTES, NCCL_CHANNELS, NcclMemory

MIB = 1024 * 1024
SMALL = 120 * 640 * 64 + 8 * 512 * 128
"""Bytes of the buffers for the two protocols of small messages."""


def test_a_group_has_a_buffer_for_each_channel_and_direction_and_the_staging() -> None:
    memory = NcclMemory(channels=3, buffer_bytes=10 * MIB)

    assert memory.group_bytes == (3 * 2 * 10 + 4) * MIB
    assert memory.worker_bytes == 16 * memory.group_bytes


def test_buffers_take_whole_pages_of_the_gpu() -> None:
    assert NcclMemory(channels=1, buffer_bytes=4 * MIB + 1).group_bytes == (2 * 6 + 4) * MIB


def test_without_variables_the_sum_is_that_of_our_own_cap() -> None:
    memory = NcclMemory.of({"PATH": "/bin"})

    assert memory == NcclMemory(channels=NCCL_CHANNELS, buffer_bytes=4 * MIB + SMALL)
    assert memory.worker_bytes == 16 * (4 * 2 * 10 + 4) * MIB
    assert GLOO_BYTES == 64 * MIB


@pytest.mark.parametrize(
    ("environ", "channels", "buffer_bytes"),
    [
        ({"NCCL_BUFFSIZE": "1048576"}, 4, MIB + SMALL),
        ({"NCCL_BUFFSIZE": "0x100000"}, 4, MIB + SMALL),
        ({"NCCL_BUFFSIZE": "4MiB"}, 4, 4 * MIB + SMALL),
        ({"NCCL_LL128_BUFFSIZE": "100", "NCCL_LL_BUFFSIZE": "10"}, 4, 4 * MIB + 110),
        ({"NCCL_MAX_CTAS": "16"}, 16, 4 * MIB + SMALL),
        ({"NCCL_MIN_CTAS": "8", "NCCL_MIN_NCHANNELS": "12"}, 16, 4 * MIB + SMALL),
        ({"NCCL_MIN_P2P_NCHANNELS": "8"}, 8, 4 * MIB + SMALL),
        ({"NCCL_MAX_CTAS": "2"}, 4, 4 * MIB + SMALL),
        ({"NCCL_MAX_CTAS": "many"}, 4, 4 * MIB + SMALL),
    ],
)
def test_variables_that_nccl_reads_itself_raise_the_channels_or_set_the_buffers(
    environ: dict[str, str], channels: int, buffer_bytes: int
) -> None:
    assert NcclMemory.of(environ) == NcclMemory(channels=channels, buffer_bytes=buffer_bytes)
