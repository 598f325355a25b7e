"""What every test may need: Ray's environment, hypothesis profiles, data, and one real server."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from deployments.cluster.environment import prepare_environment

prepare_environment()  # before anything imports ray, which reads its environment then

from tests.tools.baton_server import MODEL, BatonServer  # noqa: E402
from workers.models.errors import ModelNotFoundError  # noqa: E402
from workers.models.store import ModelStore, default_cache_dir  # noqa: E402

# Examples of a property differ in time on a shared machine; only a whole test has a limit.
settings.register_profile("dev", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def baton_data() -> Path:
    """Shared test data: BATON_DATA, or beside the repository; skips where there is none."""
    folder = Path(os.environ.get("BATON_DATA") or REPOSITORY / "../shared/data").resolve()
    if not folder.is_dir():
        pytest.skip(f"there is no test data in {folder}; set BATON_DATA")
    return folder


@pytest.fixture(scope="session")
def baton_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BatonServer]:
    """`baton serve` with one prefill and one decode worker, for all tests of the session.

    A test leaves it as it found it: answering, and with nothing of a request left.
    """
    try:
        ModelStore(default_cache_dir(os.environ)).resolve(MODEL)
    except ModelNotFoundError as error:
        pytest.skip(str(error))
    with BatonServer.started(tmp_path_factory.mktemp("baton")) as server:
        yield server
