"""Memory that others can read and only its owner can write."""

import mmap
import os

import pytest

from kv_transfer.shared_memory import (
    SharedMapping,
    SharedRegion,
    can_share_memory,
    sharing_domain,
)

SIZE = 3 * mmap.PAGESIZE


@pytest.fixture
def region():
    region = SharedRegion(SIZE)
    yield region
    region.close()


def test_a_reader_sees_what_the_owner_writes(region):
    mapping = SharedMapping(region.descriptor)
    region.buffer[SIZE - 5 :] = b"hello"
    assert mapping.size_bytes == SIZE
    assert mapping.view(SIZE - 5, 5) == b"hello"
    mapping.close()
    mapping.close()


def test_nobody_who_has_the_descriptor_can_write(region):
    mapping = SharedMapping(region.descriptor)
    with pytest.raises(TypeError, match="read-only"):
        mapping.view(0, 1)[0] = 1
    with pytest.raises(PermissionError):
        mmap.mmap(region.descriptor, SIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(region.descriptor, b"x", 0)
    # The same user may open the file again for writing; that gains nothing.
    again = os.open(f"/proc/self/fd/{region.descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        with pytest.raises(PermissionError):
            mmap.mmap(again, SIZE)
        with pytest.raises(PermissionError):
            os.pwrite(again, b"x", 0)
        with pytest.raises(PermissionError):
            os.ftruncate(again, 0)
    finally:
        os.close(again)
    mapping.close()


def test_memory_that_could_shrink_under_its_reader_is_refused():
    descriptor = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, SIZE)
    with pytest.raises(ValueError, match="not sealed"):
        SharedMapping(descriptor)
    os.close(descriptor)


@pytest.mark.parametrize(("start", "size"), [(-1, 1), (0, SIZE + 1), (SIZE, 1), (1, -1)])
def test_bytes_outside_the_memory_are_refused(region, start, size):
    mapping = SharedMapping(region.descriptor)
    with pytest.raises(IndexError):
        mapping.view(start, size)
    mapping.close()


def test_memory_outlives_the_region_and_its_descriptor_does_not():
    region = SharedRegion(SIZE)
    descriptor, buffer = region.descriptor, region.buffer
    mapping = SharedMapping(descriptor)
    buffer[0] = 7
    del region
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    del buffer
    assert mapping.view(0, 1)[0] == 7
    mapping.close()


def test_a_host_without_memory_files_shares_nothing(monkeypatch):
    assert can_share_memory()

    def refuse(*_):
        raise PermissionError("seccomp")

    monkeypatch.setattr(os, "memfd_create", refuse)
    assert not can_share_memory()


def test_a_domain_names_the_kernel_and_the_network_namespace(tmp_path):
    def domain(boot, network):
        root = tmp_path / f"{boot}-{network}"
        (root / "proc/sys/kernel/random").mkdir(parents=True)
        (root / "proc/self/ns").mkdir(parents=True)
        (root / "proc/sys/kernel/random/boot_id").write_text(f"{boot}\n")
        (root / "proc/self/ns/net").symlink_to(f"net:[{network}]")
        return sharing_domain(root)

    first = domain("a", 1)
    assert "boot a, net:[1]" in first
    assert len({first, domain("a", 2), domain("b", 1)}) == 3
    assert sharing_domain() == sharing_domain() != ""


def test_a_domain_that_cannot_be_told_is_empty(tmp_path):
    assert sharing_domain(tmp_path) == ""
