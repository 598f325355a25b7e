"""The order of the integration tests: those that share a server late, those that kill it last."""

from __future__ import annotations

import pytest

_LAST = "test_http_kill"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the order but for this: a server that idles beside other tests slows them down."""
    items.sort(key=_rank)


def _rank(item: pytest.Item) -> int:
    module = item.path.stem
    return (module == _LAST) + module.startswith("test_http_")
