"""What a process of a deployment takes from its environment."""

from __future__ import annotations

import gc

import pytest
from pydantic import ValidationError

import deployments.process
from configs.load import load
from configs.schema import Settings
from deployments.process import (
    at_own_address,
    deployment_secret,
    prepare_engine_process,
    spare_what_stays,
)
from deployments.secret import SecretError


def test_a_pod_listens_on_its_own_addresses():
    environ = {"BATON_TRANSFER__HOST": "10.0.0.7", "BATON_CHANNEL__HOST": "10.0.0.8"}
    own = at_own_address(Settings(), environ)
    assert (own.transfer.host, own.channel.host) == ("10.0.0.7", "10.0.0.8")


def test_a_pod_s_own_address_is_one_that_peers_can_dial():
    with pytest.raises(ValidationError, match="every address"):
        at_own_address(Settings(), {"BATON_TRANSFER__HOST": "0.0.0.0"})


def test_where_the_environment_names_none_the_settings_hold():
    assert at_own_address(Settings(), {"BATON_CHANNEL__HOST": ""}) == Settings()


@pytest.mark.parametrize(
    ("environ", "cores", "expected"),
    [
        ({}, 8, {"GOMP_SPINCOUNT": "20000"}),
        ({}, 2, {"OMP_WAIT_POLICY": "PASSIVE"}),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, 2, {"OMP_WAIT_POLICY": "ACTIVE"}),
        ({"GOMP_SPINCOUNT": "7"}, 8, {"GOMP_SPINCOUNT": "7"}),
    ],
    ids=["they fit", "they do not", "told to spin", "told for how long"],
)
def test_compute_threads_spin_only_where_all_workers_have_their_cores(
    monkeypatch, environ, cores, expected
):
    monkeypatch.setattr(deployments.process, "log_to_stderr", lambda: None)
    monkeypatch.setattr("sys.setswitchinterval", lambda _: None)
    settings = load("local", environ={}, overrides=["prefill.engine.threads=3"])
    prepare_engine_process(settings, cores=cores, environ=environ)
    assert environ == expected


def test_threads_of_workers_that_share_the_cores_spin_on_any_number_of_them(monkeypatch):
    monkeypatch.setattr(deployments.process, "log_to_stderr", lambda: None)
    monkeypatch.setattr("sys.setswitchinterval", lambda _: None)
    environ: dict[str, str] = {}
    prepare_engine_process(load("split-2p2d", environ={}), cores=2, environ=environ)
    assert environ == {"GOMP_SPINCOUNT": "20000"}


def test_a_secret_is_needed_and_its_absence_says_what_to_do():
    with pytest.raises(SecretError, match="BATON_SECRET"):
        deployment_secret({})
    text = "0123456789abcdef" * 2
    assert deployment_secret({"BATON_SECRET": text}).reveal() == text


def test_the_collector_passes_by_what_was_there():
    gc.unfreeze()  # what tests that have built a whole replica have left
    try:
        spare_what_stays()
        assert gc.get_freeze_count() > 10_000  # Python's own modules alone have as many
    finally:
        gc.unfreeze()
