from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.load import SettingsError, load, presets
from configs.schema import Settings

WriteFile = Callable[[str], Path]


def problems_of(
    *,
    preset: str | None = None,
    file: Path | None = None,
    environ: dict[str, str] | None = None,
    overrides: tuple[str, ...] = (),
) -> tuple[str, ...]:
    with pytest.raises(SettingsError) as error:
        load(preset, file=file, environ=environ or {}, overrides=overrides)
    assert str(error.value) == "\n".join(error.value.problems)
    return error.value.problems


@pytest.fixture
def write(tmp_path: Path) -> WriteFile:
    def write_file(text: str) -> Path:
        path = tmp_path / "baton.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write_file


def test_every_preset_is_described_and_loads() -> None:
    shipped = presets()

    assert [preset.name for preset in shipped] == ["colocated", "local", "mixed", "split-2p2d"]
    assert all(preset.description for preset in shipped)
    assert all(isinstance(load(preset.name, environ={}), Settings) for preset in shipped)


@pytest.mark.parametrize(
    ("preset", "num_prefill", "num_decode"),
    [("colocated", None, 1), ("local", 1, 1), ("mixed", 1, 2), ("split-2p2d", 2, 2)],
)
def test_presets_have_the_pools_of_their_names(
    preset: str, num_prefill: int | None, num_decode: int
) -> None:
    settings = load(preset, environ={})

    assert (settings.prefill and settings.prefill.replicas) == num_prefill
    assert settings.decode.replicas == num_decode


def test_nothing_given_is_the_schemas_defaults() -> None:
    assert load(environ={}) == Settings()


def test_later_sources_win_and_leave_the_rest(write: WriteFile) -> None:
    file = write("preset: split-2p2d\nhttp: {port: 1001, host: a}\nkv: {block_size: 32}\n")

    settings = load(
        file=file,
        environ={"BATON_HTTP__PORT": "1002", "BATON_HTTP__HOST": "b"},
        overrides=["http.port=1003", "http.port=1004"],
    )

    assert settings.http.port == 1004
    assert settings.http.host == "b"
    assert settings.kv.block_size == 32
    assert settings.decode.replicas == 2


def test_file_wins_over_the_preset_it_is_loaded_with(write: WriteFile) -> None:
    file = write("description: mine\ndecode: {replicas: 3}")

    settings = load("split-2p2d", file=file, environ={})

    assert settings.decode.replicas == 3
    assert settings.prefill is not None
    assert settings.prefill.replicas == 2


def test_empty_file_changes_nothing(write: WriteFile) -> None:
    assert load("local", file=write(""), environ={}) == load("local", environ={})


def test_file_may_name_the_preset_that_was_asked_for(write: WriteFile) -> None:
    file = write("preset: local")

    assert load("local", file=file, environ={}) == load("local", environ={})


def test_two_different_presets_are_refused(write: WriteFile) -> None:
    [problem] = problems_of(preset="colocated", file=write("preset: local"))

    assert "'colocated'" in problem
    assert "'local'" in problem


def test_null_takes_the_prefill_pool_away_and_a_setting_brings_it_back() -> None:
    assert load("local", environ={"BATON_PREFILL": "null"}).prefill is None
    assert load("local", environ={}, overrides=["prefill=null"]).prefill is None
    back = load("colocated", environ={}, overrides=["prefill.replicas=2"])
    assert back.prefill is not None
    assert back.prefill.replicas == 2


def test_override_values_have_the_types_of_yaml() -> None:
    settings = load(
        environ={"BATON_DECODE__ENGINE__POOL_BYTES": "2GiB"},
        overrides=["transfer.lease_s=2.5", "model.name='17'", "http={port: 99}"],
    )

    assert settings.decode.engine.pool_bytes == 2**31
    assert settings.transfer.lease_s == 2.5
    assert settings.model.name == "17"
    assert settings.http.port == 99


def test_override_value_may_hold_an_equals_sign() -> None:
    assert load(environ={}, overrides=["model.source=a=b"]).model.source == "a=b"


def test_variables_of_others_are_left_alone() -> None:
    environ = {"BATON_CACHE": "/tmp", "BATON_URL": "x", "BATON_": "x", "HOME": "/", "HTTP__X": "1"}

    assert load(environ=environ) == Settings()


def test_single_underscore_after_a_group_is_a_mistake_with_a_hint() -> None:
    [problem] = problems_of(environ={"BATON_DECODE_REPLICAS": "2"})

    assert "BATON_DECODE_REPLICAS" in problem
    assert "BATON_DECODE__REPLICAS" in problem


@pytest.mark.parametrize(
    ("override", "path", "hint"),
    [
        ("http.prot=1", "http.prot", "http.port"),
        ("htpp.port=1", "htpp", "http"),
        ("prefill.engine.thread=1", "prefill.engine.thread", "prefill.engine.threads"),
        ("decode.engine.pool_token=1", "decode.engine.pool_token", "decode.engine.pool_tokens"),
    ],
)
def test_unknown_name_is_refused_with_its_path_and_the_nearest_known(
    override: str, path: str, hint: str
) -> None:
    [problem] = problems_of(overrides=(override,))

    assert problem == (
        f"{path}: there is no such setting (from --set {override}); did you mean {hint}?"
    )


def test_unknown_name_like_no_other_gets_no_hint() -> None:
    [problem] = problems_of(overrides=("xyzzy=1",))

    assert problem == "xyzzy: there is no such setting (from --set xyzzy=1)."


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("http.port=x", "http.port: must be a whole number, but is 'x'"),
        ("http.port=true", "http.port: must be a whole number, but is True"),
        ("http.port=1.5", "http.port: must be a whole number, but is 1.5"),
        ("http.port=null", "http.port: must be a whole number, but is None"),
        ("http.port=0", "http.port: must be at least 1, but is 0"),
        ("http.port=70000", "http.port: must be at most 65535, but is 70000"),
        ("http.host=7", "http.host: must be text, but is 7 (quote it to keep it text)"),
        ("http.host=''", "http.host: must not be empty"),
        ("http.keep_alive_s=0", "http.keep_alive_s: must be above 0, but is 0"),
        ("http.keep_alive_s=.inf", "http.keep_alive_s: must be finite, but is inf"),
        ("http.keep_alive_s=[1]", "http.keep_alive_s: must be a number, but is [1]"),
        ("model.dtype=fp16", "model.dtype: must be 'auto', 'fp32' or 'bf16', but is 'fp16'"),
        ("http=7", "http: must be a group of settings, but is 7"),
        ("http=null", "http: must be a group of settings, but is None"),
        (
            "http.max_body_bytes=1ZB",
            "http.max_body_bytes: must be a number of bytes or a size such as 512MiB or 2GiB, "
            "but is '1ZB'",
        ),
        (
            "http.keep_alive_s=600",
            "http: keep_alive_s (600) must be below request_timeout_s (600)",
        ),
    ],
)
def test_each_wrong_value_is_one_sentence_with_its_path_and_source(
    override: str, problem: str
) -> None:
    assert problems_of(overrides=(override,)) == (f"{problem} (from --set {override}).",)


def test_kinds_of_problems_without_a_sentence_of_ours_keep_pydantics() -> None:
    [problem] = problems_of(overrides=("http={1: 2}",))

    assert problem.startswith("http.1")
    assert "Keys should be strings" in problem


def test_source_is_the_last_one_that_set_the_value(write: WriteFile) -> None:
    file = write("http: {port: 0}")

    assert "(from " + str(file) in problems_of(file=file)[0]
    environ = {"BATON_HTTP__PORT": "-1", "BATON_HTTP__HOST": "h"}
    assert "(from BATON_HTTP__PORT)" in problems_of(file=file, environ=environ)[0]


def test_all_problems_are_told_at_once() -> None:
    problems = problems_of(overrides=("http.port=x", "kv.block_size=0", "nonsense=1"))

    assert len(problems) == 3


def test_problem_of_a_default_among_given_values_names_the_group() -> None:
    [problem] = problems_of(overrides=("decode.engine.step_tokens=3",))

    assert problem.startswith("decode.engine: step_tokens (3) must be at least max_sequences (64)")


def test_unknown_preset_is_refused_with_the_known_ones() -> None:
    [problem] = problems_of(preset="lokal")

    assert problem == "There is no preset 'lokal'; there are colocated, local, mixed, split-2p2d."


@pytest.mark.parametrize("override", ["http.port", "=1", ".port=1", "http.=1", "a..b=1"])
def test_override_without_name_and_value_is_refused(override: str) -> None:
    [problem] = problems_of(overrides=(override,))

    assert problem.startswith("--set takes name=value")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("http: {port: 1", "not valid YAML"),
        ("http: {port: 1}\nhttp: {}", "'http' appears twice (line 1, column 1)"),
        ("[1, 2]", "must hold named settings"),
        ("17", "must hold named settings"),
        ("1: 2", "must hold named settings"),
        ("? [a]\n: 1", "not valid YAML"),
        ("preset: [local]", "preset in"),
        ("description: 3", "description in"),
        ("preset: nowhere", "no preset 'nowhere'"),
        ("a: \x07", "not valid YAML"),
        ("a: 2001-99-99", "not valid YAML: month must be in 1..12"),
    ],
)
def test_file_that_is_not_settings_is_refused(write: WriteFile, text: str, words: str) -> None:
    [problem] = problems_of(file=write(text))

    assert words in problem


def test_file_that_cannot_be_read_is_refused_with_the_reason(tmp_path: Path) -> None:
    missing = tmp_path / "none.yaml"

    assert problems_of(file=missing) == (
        f"The settings file {missing} cannot be read: No such file or directory.",
    )


def test_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "b.yaml"
    path.write_bytes(b"\xff\xfe\xfa")

    [problem] = problems_of(file=path)

    assert "not UTF-8" in problem


@pytest.mark.parametrize("value", ["{", "{a: 1, a: 2}", "2001-99-99"])
def test_override_that_is_not_yaml_is_refused(value: str) -> None:
    [problem] = problems_of(overrides=(f"http={value}",))

    assert problem.startswith(f"The value of --set http={value} is not valid YAML")


@given(
    environ=st.dictionaries(
        st.sampled_from(
            ["BATON_HTTP__PORT", "BATON_HTTP", "BATON_PREFILL", "BATON_X__Y", "BATON_KV_"]
        ),
        st.text(max_size=12),
    ),
    overrides=st.lists(
        st.tuples(
            st.sampled_from(["http.port", "model.source", "prefill", "decode.engine", "a.b", ""]),
            st.text(max_size=12),
        ).map("=".join),
        max_size=3,
    ),
)
def test_any_text_gives_settings_or_sentences(
    environ: dict[str, str], overrides: list[str]
) -> None:
    problems: tuple[str, ...] = ()
    try:
        load("local", environ=environ, overrides=overrides)
    except SettingsError as error:
        problems = error.problems
    assert all(problem.endswith((".", "?")) for problem in problems)
