"""The transports that most tests of a stream are run over."""

import pytest

from tests.fakes.stream_kinds import ALL_KINDS, DEVICE_KINDS, FRAME_KINDS, kind_parameters


@pytest.fixture(params=kind_parameters((*ALL_KINDS, *DEVICE_KINDS)))
def kind(request):
    """Every one of them."""
    return request.param


@pytest.fixture(params=kind_parameters(FRAME_KINDS))
def framed(request):
    """Those whose blocks can be had, or given, by frames alone."""
    return request.param
