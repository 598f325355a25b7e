"""The store of a pair: what one end writes, the other reads; no wait outlives the channel."""

import threading
from datetime import timedelta

import pytest

from kv_transfer.transports.mirrored_store import MirroredStore, StoreClosedError


def test_what_is_written_is_published_and_read():
    published = []
    store = MirroredStore(lambda key, value: published.append((key, value)), 1.0)
    store.set("a", b"1")
    store.set("b", "2")
    assert published == [("a", b"1"), ("b", b"2")]
    assert (store.get("a"), store.get("b")) == (b"1", b"2")
    assert store.check(["a", "b"])
    assert not store.check(["a", "c"])


def test_a_wait_ends_with_what_the_peer_writes():
    store = MirroredStore(lambda key, value: None, 10.0)
    got = []
    reader = threading.Thread(target=lambda: got.append(store.get("k")))
    reader.start()
    store.put("k", b"v")
    reader.join(10)
    assert got == [b"v"]
    store.wait(["k"], timedelta(seconds=1))


def test_a_closed_store_ends_waits_but_keeps_what_is_there():
    store = MirroredStore(lambda key, value: None, 60.0)
    store.put("k", b"v")
    failed = []

    def read():
        try:
            store.wait(["k", "never"])
        except StoreClosedError as error:
            failed.append(str(error))

    reader = threading.Thread(target=read)
    reader.start()
    store.close()
    reader.join(10)
    assert failed == ["the peer has not written ['never']"]
    assert store.get("k") == b"v"
    with pytest.raises(StoreClosedError):
        store.get("never")


def test_a_wait_has_its_own_deadline():
    with pytest.raises(StoreClosedError):
        MirroredStore(lambda key, value: None, 0.0).get("never")
