"""Where the deployment's secret is taken from, and to whom it is handed on."""

from __future__ import annotations

import pytest

from deployments.cluster.environment import instance_environment
from deployments.cluster.ports import Ports
from deployments.secret import SecretError, read_secret
from kv_transfer.authentication import Secret

TEXT = "a secret of this deployment, which is long"


def test_the_variable_names_it():
    found = read_secret({"BATON_SECRET": TEXT})
    assert found is not None
    assert found.reveal() == TEXT


def test_the_file_holds_it(tmp_path):
    path = tmp_path / "secret"
    path.write_text(f"{TEXT}\n", encoding="utf-8")

    found = read_secret({"BATON_SECRET_FILE": str(path)})

    assert found is not None
    assert found.reveal() == TEXT


def test_the_variable_comes_before_the_file(tmp_path):
    environ = {"BATON_SECRET": TEXT, "BATON_SECRET_FILE": str(tmp_path / "none")}
    found = read_secret(environ)
    assert found is not None
    assert found.reveal() == TEXT


@pytest.mark.parametrize("environ", [{}, {"BATON_SECRET": ""}, {"BATON_SECRET_FILE": ""}])
def test_without_either_there_is_none(environ):
    assert read_secret(environ) is None


def test_a_short_one_is_refused_without_being_shown():
    with pytest.raises(SecretError, match=r"BATON_SECRET: .* at least 32 bytes") as refused:
        read_secret({"BATON_SECRET": "hunter2"})
    assert "hunter2" not in str(refused.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    path = tmp_path / "none"
    with pytest.raises(SecretError, match=f"BATON_SECRET_FILE={path} cannot be read: No such file"):
        read_secret({"BATON_SECRET_FILE": str(path)})


def test_processes_of_an_instance_get_it_in_their_environment(tmp_path):
    environment = instance_environment(
        instance_id="i",
        runtime_dir=tmp_path,
        ports=Ports(
            metrics=1, stats=2, fallback=3, fallback_grpc=4, first_replica=5, last_replica=6
        ),
        launcher=tmp_path / "haproxy",
        token=tmp_path / "token",
        secret=Secret(TEXT),
        python_path="",
    )
    assert [name for name, value in environment.items() if TEXT in value] == ["BATON_SECRET"]
