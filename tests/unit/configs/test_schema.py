from __future__ import annotations

import pytest
from pydantic import ValidationError

from configs.schema import (
    ChannelSettings,
    EngineSettings,
    HttpSettings,
    ModelSettings,
    Settings,
    TransferSettings,
)


def test_defaults_are_colocated_and_local() -> None:
    settings = Settings()

    assert settings.prefill is None
    assert settings.http.host == "127.0.0.1"
    assert settings.transfer.host == "127.0.0.1"


def test_settings_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        setattr(Settings().http, "port", 1)  # noqa: B010  # mypy refuses the plain form


TLS_FILES = {"certificate": "a.pem", "key": "a.key", "ca": "ca.pem"}


@pytest.mark.parametrize(
    ("source", "name", "served"),
    [
        ("smollm2-135m", None, "smollm2-135m"),
        ("org/some-model", None, "some-model"),
        ("/models/folder/", None, "folder"),
        ("/", None, "/"),
        ("org/some-model", "mine", "mine"),
    ],
)
def test_served_name_defaults_to_the_sources_last_part(
    source: str, name: str | None, served: str
) -> None:
    assert ModelSettings(source=source, name=name).served_name == served


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("2GiB", 2 * 2**30),
        ("1.5 kib", 1536),
        ("3MB", 3_000_000),
        ("17 B", 17),
        (123, 123),
    ],
)
def test_sizes_are_read_with_their_units(text: object, num_bytes: int) -> None:
    assert EngineSettings.model_validate({"pool_bytes": text}).pool_bytes == num_bytes


@pytest.mark.parametrize("text", ["2", "GiB", "2 gigs", "-1GiB", "0B", "", 1.5, True, 0])
def test_sizes_that_say_nothing_clear_are_refused(text: object) -> None:
    with pytest.raises(ValidationError):
        EngineSettings.model_validate({"pool_bytes": text})


@pytest.mark.parametrize(
    ("group", "values", "words"),
    [
        (EngineSettings, {"pool_tokens": 1, "pool_bytes": 2}, "at most one"),
        (EngineSettings, {"step_tokens": 256, "max_sequences": 257}, "max_sequences"),
        (EngineSettings, {"step_tokens": 255}, "prefill_chunk_tokens"),
        (EngineSettings, {"max_sequences": 0}, "greater than or equal to 1"),
        (TransferSettings, {"lease_s": 60, "deadline_s": 60}, "below deadline_s"),
        (TransferSettings, {"lease_s": 0.5}, "greater than or equal to 1"),
        (TransferSettings, {"transport": "pigeon"}, "auto"),
        (TransferSettings, {"transport": "shm", "tls": TLS_FILES}, "encrypts what moves over tcp"),
        (TransferSettings, {"tls": {"certificate": "a.pem"}}, "ca\n.*Field required"),
        (HttpSettings, {"keep_alive_s": 600}, "below request_timeout_s"),
        (HttpSettings, {"port": 65536}, "65535"),
        (HttpSettings, {"keep_alive_s": float("nan")}, "finite"),
        (HttpSettings, {"host": ""}, "at least 1 character"),
        (ChannelSettings, {"port": 65536}, "65535"),
        (ChannelSettings, {"host": "0.0.0.0"}, "is 0.0.0.0, every address .* give the one address"),
        (ChannelSettings, {"host": "::"}, "is ::, every address"),
        (TransferSettings, {"host": "0.0.0.0"}, "is 0.0.0.0, every address"),
        (TransferSettings, {"host": "::"}, "is ::, every address"),
        (Settings, {"channel": {"port": 9000}, "decode": {"replicas": 2}}, "2 decode workers"),
        (Settings, {"prefill": {"replicas": 0}}, "greater than or equal to 1"),
        (Settings, {"decode": {"local_prefill_tokens": -1}}, "greater than or equal to 0"),
        (Settings, {"decode": {"surplus": 1}}, "Extra inputs"),
    ],
)
def test_values_that_break_a_rule_are_refused(
    group: type[Settings], values: dict[str, object], words: str
) -> None:
    with pytest.raises(ValidationError, match=words):
        group.model_validate(values)


@pytest.mark.parametrize(
    ("group", "values"),
    [
        (EngineSettings, {"step_tokens": 256, "max_sequences": 256}),
        (TransferSettings, {"lease_s": 59, "deadline_s": 60}),
        (TransferSettings, {"transport": "auto", "tls": TLS_FILES}),
        (TransferSettings, {"transport": "tcp", "tls": TLS_FILES}),
        (ChannelSettings, {"host": "worker-7.pool"}),
        (TransferSettings, {"host": "::1"}),
        (HttpSettings, {"host": "0.0.0.0"}),
        (HttpSettings, {"port": 65535, "keep_alive_s": 599.9}),
        (Settings, {"decode": {"local_prefill_tokens": 0}}),
        (Settings, {"channel": {"port": 9000}}),
        (Settings, {"channel": {"port": 9000, "host": "10.0.0.7"}, "decode": {"replicas": 2}}),
    ],
)
def test_values_at_the_edge_of_a_rule_are_taken(
    group: type[Settings], values: dict[str, object]
) -> None:
    group.model_validate(values)
