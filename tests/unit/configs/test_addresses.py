from __future__ import annotations

import pytest

from configs.addresses import is_loopback


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_this_machine_alone_is_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host", ["10.0.0.1", "0.0.0.0", "::", "localhost.example.org", "127.0.0.1.example.org", ""]
)
def test_what_others_may_reach_is_not(host: str) -> None:
    assert not is_loopback(host)
