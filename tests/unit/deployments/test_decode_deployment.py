"""The decode deployment: what a replica gives its worker, without Serve and without a model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import deployments.decode
import workers.assembly
from configs.schema import Settings
from deployments.channel.stream import ChannelLostError
from deployments.control_call import CHANNEL_ADDRESS, DRAIN, INTRODUCE, SNAPSHOT, ControlCall
from deployments.decode import Decode
from deployments.metrics import WorkerSnapshot, sample
from kv_transfer.sealing import REFUSAL
from tests.fakes.channel import FakeWorker, raw_front
from tests.fakes.prefill_call import OTHER_SECRET, SECRET
from tests.fakes.until import until


class FakeDecodeWorker(FakeWorker):
    """A `DecodeWorker`, as far as its deployment uses it at the start and at the end."""

    healthy = True

    def __init__(self) -> None:
        super().__init__()
        self.drains: list[float] = []

    async def start(self) -> None:
        """See `DecodeWorker.start`."""

    async def drain(self, *, timeout_s: float) -> None:
        """See `DecodeWorker.drain`."""
        self.drains.append(timeout_s)


class Replica(Decode):
    """Ended by the test, as by Serve, and not when Python collects it."""

    def __del__(self) -> None:
        """Nothing is left to do."""


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """The settings that each worker was built with."""
    settings_seen: list[Settings] = []

    def build(settings: Settings, **_: Any) -> FakeDecodeWorker:
        settings_seen.append(settings)
        return FakeDecodeWorker()

    context = SimpleNamespace(
        rank=SimpleNamespace(rank=0),
        replica_id=SimpleNamespace(unique_id="replica-a"),
        _deployment_config=SimpleNamespace(graceful_shutdown_timeout_s=1.0),
    )
    monkeypatch.setattr(workers.assembly, "build_decode_worker", build)
    monkeypatch.setattr(deployments.decode.serve, "get_replica_context", lambda: context)
    monkeypatch.setattr(deployments.decode, "prepare_engine_process", lambda *_, **__: None)
    monkeypatch.setenv("BATON_SECRET", SECRET.reveal())
    return settings_seen


async def test_a_pod_s_worker_is_at_its_own_address_for_peers_and_for_fronts(built, monkeypatch):
    monkeypatch.setenv("BATON_TRANSFER__HOST", "127.0.0.2")
    monkeypatch.setenv("BATON_CHANNEL__HOST", "127.0.0.3")
    replica = Replica.__new__(Replica)  # as Serve makes it
    await replica.__init__(Settings())
    try:
        assert [settings.transfer.host for settings in built] == ["127.0.0.2"]
        call = ControlCall(SECRET, CHANNEL_ADDRESS)
        (address,) = call.open_all([await replica.control(call.message)]).values()
        assert (address.worker, address.host) == ("replica-a", "127.0.0.3")
    finally:
        await Decode.__del__(replica)


async def test_a_replica_drains_for_who_knows_its_secret_alone(built):
    replica = Replica.__new__(Replica)
    await replica.__init__(Settings())
    try:
        introduced = ControlCall(SECRET, INTRODUCE)
        names = introduced.open_all([await replica.control(introduced.message)])
        for message in (
            "drain",
            ControlCall(OTHER_SECRET, DRAIN, 5.0, meant_for=names).message,
        ):
            assert await replica.control(message) == REFUSAL
        assert replica._worker.drains == []
        call = ControlCall(SECRET, DRAIN, 5.0, meant_for=names)
        assert call.open_all([await replica.control(call.message)]) == names
        assert replica._worker.drains == [5.0]
    finally:
        await Decode.__del__(replica)


async def test_a_replica_shows_the_strangers_at_its_channel_and_at_its_gate(built, monkeypatch):
    def shown(_: object, *, num_strangers: int) -> WorkerSnapshot:
        samples = (sample("baton_strangers_total", num_strangers),)
        return WorkerSnapshot(worker_id="decode-0", role="decode", samples=samples)

    monkeypatch.setattr(deployments.decode, "decode_snapshot", shown)
    replica = Replica.__new__(Replica)
    await replica.__init__(Settings())
    try:
        asked = ControlCall(SECRET, CHANNEL_ADDRESS)
        (address,) = asked.open_all([await replica.control(asked.message)]).values()
        with pytest.raises(ChannelLostError):
            await raw_front(address, OTHER_SECRET)
        await until(lambda: replica._channel.num_strangers == 1)
        for stranger in ("snapshot", ControlCall(OTHER_SECRET, SNAPSHOT).message):
            assert await replica.control(stranger) == REFUSAL
        call = ControlCall(SECRET, SNAPSHOT)
        (snapshot,) = call.open_all([await replica.control(call.message)]).values()
        assert snapshot == shown(None, num_strangers=1 + 2)
    finally:
        await Decode.__del__(replica)
