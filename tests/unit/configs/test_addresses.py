from __future__ import annotations

import pytest

from configs.addresses import interface_of, is_loopback


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_this_machine_alone_is_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host", ["10.0.0.1", "0.0.0.0", "::", "localhost.example.org", "127.0.0.1.example.org", ""]
)
def test_what_others_may_reach_is_not(host: str) -> None:
    assert not is_loopback(host)


def test_the_interface_of_an_address_is_the_one_that_has_it() -> None:
    addresses = {"lo": ["127.0.0.1", "::1"], "eth0": ["192.0.2.2"]}
    assert interface_of("localhost", addresses) == "lo"
    assert interface_of("192.0.2.2", addresses) == "eth0"
    with pytest.raises(ValueError, match=r"address 192\.0\.2\.77"):
        interface_of("192.0.2.77", addresses)
