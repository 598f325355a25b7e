"""Bodies: every parameter has its effect, asks for nothing, or is an error that names it."""

from __future__ import annotations

import json

import pytest

from deployments.openai.body import decode_object
from deployments.openai.errors import InvalidRequestError
from deployments.openai.schema import parse_chat, parse_completion, template_message

COMPLETION = {"model": "m", "prompt": "hi"}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
PARSERS = [(parse_completion, COMPLETION), (parse_chat, CHAT)]


def refusal(parser, body) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        parser(body)
    assert caught.value.message
    return caught.value


def message(**fields):
    return {**CHAT, "messages": [{"role": "user", "content": "hi", **fields}]}


@pytest.mark.parametrize(
    "raw",
    [
        b'{"model": "m", x}',  # row 10
        b"",
        b"[]",  # row 11
        b"null",
        b"123",
        b'"s"',
        b"\xff{}",
        b'{"temperature": NaN}',
        b'{"temperature": -Infinity}',
        b'{"max_tokens": 1' + b"0" * 5000 + b"}",
        b'{"a":' * 100_000,
        b'{"prompt": "\\ud800"}',
        b'{"\\udfff": 1}',
        "{}".encode("utf-16"),
    ],
)
def test_what_is_no_json_object_is_refused(raw):
    with pytest.raises(InvalidRequestError):
        decode_object(raw)


def test_escaped_characters_are_read_whole():
    assert decode_object(b'{"prompt": "\\ud83d\\ude00"}') == {"prompt": "\U0001f600"}


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hi", ("hi",)),
        (["hi", "ho"], ("hi", "ho")),
        ([1, 2], ((1, 2),)),
        ([[1, 2], [0]], ((1, 2), (0,))),
    ],
)
def test_all_four_forms_of_prompt(prompt, expected):
    assert parse_completion({**COMPLETION, "prompt": prompt}).prompt == expected


@pytest.mark.parametrize(
    "prompt",
    [
        *("", [], [""], [[]], ["a", ""], [[1], []]),  # row 1
        *(None, 5, {}, True, [True], [1.0], [-1], ["a", 1], [[1], "a"], [[1], 2], [[True]], [None]),
    ],
)
def test_other_prompts_are_refused_by_name(prompt):
    assert refusal(parse_completion, {**COMPLETION, "prompt": prompt}).param == "prompt"


BAD_VALUES = [
    ("model", ""),
    ("model", 5),
    ("max_tokens", 0),  # row 16
    ("max_tokens", -1),
    ("max_tokens", True),
    ("max_tokens", 5.0),
    ("max_tokens", "5"),
    ("max_tokens", 2**31),
    ("max_completion_tokens", 0),
    ("min_tokens", -1),
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", True),
    ("temperature", "1"),
    ("temperature", float("nan")),
    ("temperature", float("inf")),
    ("top_p", 0),
    ("top_p", 1.01),
    ("top_k", -2),
    ("top_k", 1.5),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("seed", 2**63),
    ("seed", -(2**63) - 1),
    ("seed", 1.0),
    ("stop", 5),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", ["a", None]),
    ("stop", ["a"] * 17),
    ("stop", {"a": 1}),
    ("stop_token_ids[0]", [-1]),
    ("stop_token_ids[1]", [1, True]),
    ("stop_token_ids", 5),
    ("ignore_eos", 1),
    ("n", 0),
    ("n", 129),
    ("n", True),
    ("stream", "true"),
    ("stream", 1),
    ("stream_options", []),
    ("repetition_penalty", 0),
    ("repetition_penalty", -1.0),
    ("repetition_penalty", 100.5),
    ("repetition_penalty", True),
    ("frequency_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("frequency_penalty", False),
    ("presence_penalty", 2.01),
    ("presence_penalty", "1"),
    ("prompt_logprobs", -1),  # row 22
    ("prompt_logprobs", 21),
    ("prompt_logprobs", True),
    ("logit_bias", []),
    ("logit_bias", {"AI": -100}),  # row 5
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"01": 1}),
    ("logit_bias", {"1.0": 1}),
    ("logit_bias", {"\u0661": 1}),
    ("logit_bias", {"9" * 5000: 1}),
    ("logit_bias", {"1": 100.5}),
    ("logit_bias", {"1": -101}),
    ("logit_bias", {"1": True}),
    ("logit_bias", {"1": None}),
    ("logit_bias", {"1": "5"}),
    ("logit_bias", {str(token_id): 1 for token_id in range(1025)}),
    ("priority", 101),
    ("priority", 0.5),
    ("cache_salt", ""),
    ("cache_salt", 5),
    ("cache_salt", "x" * 513),
]


@pytest.mark.parametrize(("parser", "body"), PARSERS)
@pytest.mark.parametrize(("param", "value"), BAD_VALUES)
def test_a_value_out_of_range_or_of_another_type_is_refused_by_name(parser, body, param, value):
    name = param.partition("[")[0]
    assert refusal(parser, {**body, name: value}).param == param


GOOD_VALUES = [
    ("max_tokens", 1),
    ("temperature", 0),
    ("temperature", 2),
    ("top_p", 1),
    ("top_p", 0.01),
    ("top_k", -1),
    ("min_p", 1),
    ("repetition_penalty", 0.01),
    ("repetition_penalty", 100),
    ("frequency_penalty", -2),
    ("presence_penalty", 2),
    ("prompt_logprobs", 0),
    ("prompt_logprobs", 20),
    ("seed", -1),
    ("seed", 2**63 - 1),
    ("seed", -(2**63)),
    ("stop_token_ids", [0]),
    ("n", 128),
    ("priority", -100),
    ("cache_salt", "x"),
    ("stream", False),
]


@pytest.mark.parametrize(("parser", "body"), PARSERS)
@pytest.mark.parametrize(("name", "value"), GOOD_VALUES)
def test_a_value_in_range_is_taken(parser, body, name, value):
    assert getattr(parser({**body, name: value}), name) == value


@pytest.mark.parametrize(("parser", "body"), PARSERS)
def test_null_is_the_same_as_absent(parser, body):
    optional = set(type(parser(body)).model_fields) - {"model", "prompt", "messages"}
    assert parser({**body, **dict.fromkeys(optional)}) == parser(body)


@pytest.mark.parametrize(("stop", "stops"), [("a", ("a",)), (["b", "a", "b"], ("b", "a"))])
def test_stop_is_a_string_or_a_list(stop, stops):
    assert parse_completion({**COMPLETION, "stop": stop}).stop == stops


def test_a_logit_bias_is_read_as_ids_and_numbers():
    bias = {"0": -100, "7": 0.5, "49151": 100}
    assert parse_chat({**CHAT, "logit_bias": bias}).logit_bias == (
        (0, -100.0),
        (7, 0.5),
        (49151, 100.0),
    )
    assert parse_chat({**CHAT, "logit_bias": {}}) == parse_chat(CHAT)


@pytest.mark.parametrize("value", [-1, 6, True, 1.0])
def test_completions_take_a_number_of_log_probabilities_up_to_5(value):
    assert refusal(parse_completion, {**COMPLETION, "logprobs": value}).param == "logprobs"
    asked = [parse_completion({**COMPLETION, "logprobs": number}) for number in (None, 0, 5)]
    assert [body.num_logprobs for body in asked] == [None, 0, 5]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": 1}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 2}, "top_logprobs"),
    ],
)
def test_chat_takes_log_probabilities_or_not_and_their_number_apart(fields, param):
    assert refusal(parse_chat, {**CHAT, **fields}).param == param


def test_chats_log_probabilities_do_not_need_a_number():
    """Row 68."""
    asked: list[dict] = [
        {},
        {"logprobs": False, "top_logprobs": 0},
        {"logprobs": True},
        {"logprobs": True, "top_logprobs": 0},
        {"logprobs": True, "top_logprobs": 20},
    ]
    assert [parse_chat({**CHAT, **fields}).num_logprobs for fields in asked] == [
        None,
        None,
        0,
        0,
        20,
    ]


@pytest.mark.parametrize(
    ("parser", "body", "off", "on"),
    [(parse_completion, COMPLETION, None, 0), (parse_chat, CHAT, False, True)],
)
def test_token_ids_are_of_log_probabilities_and_need_them(parser, body, off, on):
    name = "return_tokens_as_token_ids"
    assert refusal(parser, {**body, "logprobs": off, name: True}).param == name
    assert refusal(parser, {**body, "logprobs": on, name: 1}).param == name
    assert parser({**body, "logprobs": on, name: True}).return_tokens_as_token_ids
    for neutral in (False, None):
        assert not parser({**body, name: neutral}).return_tokens_as_token_ids


@pytest.mark.parametrize(
    ("fields", "number"),
    [
        ({}, None),
        ({"logprobs": 3}, None),
        ({"echo": True}, None),
        ({"echo": True, "logprobs": 3}, 3),
        ({"prompt_logprobs": 2}, 2),
        ({"prompt_logprobs": 2, "echo": True, "logprobs": 0}, 2),
        ({"prompt_logprobs": 0, "echo": True, "logprobs": 4}, 4),
    ],
)
def test_an_echoed_prompt_is_scored_like_the_text_after_it(fields, number):
    assert parse_completion({**COMPLETION, **fields}).num_prompt_logprobs == number


@pytest.mark.parametrize("number", [None, 0, 2])
def test_a_chats_prompt_is_scored_only_where_that_is_asked_for(number):
    body = parse_chat({**CHAT, "logprobs": True, "top_logprobs": 3, "prompt_logprobs": number})

    assert body.num_prompt_logprobs == number


def test_no_output_is_asked_for_only_with_an_echo():
    """Rows 16 and 43."""
    assert refusal(parse_completion, {**COMPLETION, "max_tokens": 0}).param == "max_tokens"
    assert parse_completion({**COMPLETION, "max_tokens": 0, "echo": True}).max_tokens == 0


UNSUPPORTED = [
    (parse_completion, "suffix", "x", [None, ""]),
    (parse_completion, "best_of", 2, [None, 1]),
    (parse_chat, "echo", True, [None, False]),
    (parse_chat, "tools", [{"type": "function"}], [None, []]),
    (parse_chat, "tool_choice", "required", [None, "none", "auto"]),
    (parse_chat, "tool_choice", {"type": "function"}, [None]),
    (parse_chat, "modalities", ["audio"], [["text"]]),
    *(
        (parser, name, value, neutral)
        for parser in (parse_completion, parse_chat)
        for name, value, neutral in (
            ("response_format", {"type": "json_schema", "schema": {}}, [None]),  # row 9
            ("response_format", {"type": "yaml"}, [{"type": "text"}]),  # row 28
            ("structured_outputs", {"json_object": False}, [None]),  # row 7
        )
    ),
]


@pytest.mark.parametrize(("parser", "name", "value", "neutral"), UNSUPPORTED)
def test_what_is_not_implemented_is_taken_only_at_its_neutral_value(parser, name, value, neutral):
    body = dict(PARSERS)[parser]
    error = refusal(parser, {**body, name: value})
    assert (error.param, error.code) == (name, "unsupported_parameter")
    for asks_for_nothing in neutral:
        assert parser({**body, name: asks_for_nothing}) == parser(body)


@pytest.mark.parametrize(("parser", "body"), PARSERS)
def test_what_only_a_providers_records_need_is_ignored(parser, body):
    extras = {"user": "u", "metadata": {"a": "b"}, "store": True, "prompt_cache_key": "k"}
    assert parser({**body, **extras}) == parser(body)


@pytest.mark.parametrize(
    ("parser", "body", "param", "hint"),
    [
        (parse_completion, {**COMPLETION, "max_token": 5}, "max_token", "'max_tokens'"),
        (parse_chat, {**CHAT, "temprature": 1}, "temprature", "'temperature'"),
        (parse_chat, {**CHAT, "logitbias": {}}, "logitbias", "'logit_bias'"),
        (parse_chat, {**CHAT, "qqqq": 1}, "qqqq", None),
        (parse_chat, {**CHAT, "stream_options": {"include_usag": True}, "stream": True}, "", ""),
        (parse_chat, message(contents="x"), "messages[0].contents", "'content'"),
    ],
)
def test_an_unknown_parameter_is_refused_with_the_nearest_name(parser, body, param, hint):
    error = refusal(parser, body)
    if param:
        assert error.param == param
    assert error.code == "unknown_parameter"
    assert (hint or "") in error.message
    assert ("did you mean" in error.message) == (hint is not None)


def test_a_long_name_of_the_clients_is_not_repeated_whole():
    error = refusal(parse_chat, {**CHAT, "x" * 10_000: 1})
    assert len(error.message) < 200


@pytest.mark.parametrize("missing", ["model", "prompt"])
def test_a_missing_parameter_is_named(missing):
    body = {name: value for name, value in COMPLETION.items() if name != missing}
    error = refusal(parse_completion, body)
    assert (error.param, "missing" in error.message) == (missing, True)


def test_stream_options_need_a_stream():
    options = {"stream_options": {"include_usage": True}}
    assert refusal(parse_chat, {**CHAT, **options}).param == "stream_options"
    body = parse_chat({**CHAT, **options, "stream": True})
    assert body.stream_options is not None
    assert body.stream_options.include_usage


def test_two_names_of_one_limit_must_agree():
    both = {**CHAT, "max_tokens": 5, "max_completion_tokens": 5}
    assert parse_chat(both).max_tokens == 5
    error = refusal(parse_chat, {**both, "max_tokens": 6})
    assert error.param == "max_completion_tokens"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({**CHAT, "messages": []}, "messages"),
        ({**CHAT, "messages": "hi"}, "messages"),
        ({**CHAT, "messages": ["x"]}, "messages[0]"),  # row 18
        (message(role=""), "messages[0].role"),
        (message(role=None), "messages[0].role"),
        (message(content=5), "messages[0].content"),
        (message(content=["x"]), "messages[0].content"),
        (message(content=[{"text": "x"}]), "messages[0].content"),
        (message(content=[{"type": "text"}]), "messages[0].content"),
        (message(content=[{"type": "text", "text": 5}]), "messages[0].content"),
        (message(content=[{"type": "text", "text": "x", "y": 1}]), "messages[0].content"),
        (message(content=[{"type": "image_url", "image_url": {}}]), "messages[0].content"),
        (message(refusal="no"), "messages[0].refusal"),
        (message(annotations=[1]), "messages[0].annotations"),
    ],
)
def test_other_messages_are_refused_by_their_place(body, param):
    assert refusal(parse_chat, body).param == param


def test_text_parts_follow_each_other():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    (parsed,) = parse_chat(message(content=parts)).messages
    assert template_message(parsed) == {"role": "user", "content": "ab"}


def test_an_answer_sent_back_as_it_came_is_taken():
    sent = message(refusal=None, audio=None, function_call=None, annotations=[], tool_calls=None)
    assert template_message(parse_chat(sent).messages[0]) == {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("arguments", "seen"),
    [
        ('{"a": 1}', {"a": 1}),
        ("{bad", "{bad"),  # row 20
        ("[1]", "[1]"),
        ("[" * 100_000, "[" * 100_000),
        ({"a": 1}, {"a": 1}),
    ],
)
def test_tool_arguments_are_an_object_where_they_are_one(arguments, seen):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    sent = message(role="assistant", content=None, tool_calls=[call], name="n", tool_call_id="1")
    fields = template_message(parse_chat(json.loads(json.dumps(sent))).messages[0])
    assert fields["tool_calls"][0]["function"] == {"name": "f", "arguments": seen}
    assert (fields["content"], fields["name"], fields["tool_call_id"]) == ("", "n", "1")


def test_a_tool_call_of_another_kind_is_passed_through():
    sent = message(tool_calls=[{"custom": 1}])
    assert template_message(parse_chat(sent).messages[0])["tool_calls"] == [{"custom": 1}]
