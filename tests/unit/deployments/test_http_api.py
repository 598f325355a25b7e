"""The HTTP surface as clients use it: paths, bodies, headers, errors, and the official client."""

from __future__ import annotations

import asyncio
import logging

import httpx
import openai
import pytest

from deployments.http_app import build_app
from deployments.metrics import WorkerSnapshot, sample
from tests.fakes.backend import Step, finished, frame, frames, tokens_then_end
from tests.fakes.front import MODEL, WINDOW, client_of, ids_of, make_codec, make_front
from workers.messages import Failed, FailureCode, FinishReason, GenerateRequest

ANSWER = "Hello \uc548\ub155 \U0001f600 END of it"
COMPLETION = {"model": MODEL, "prompt": "hi", "temperature": 0}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
PATHS = [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)]


@pytest.fixture(scope="module")
def codec():
    return make_codec()


@pytest.fixture
def answer_ids():
    return ids_of(ANSWER)


@pytest.fixture
def served(codec, answer_ids):
    """A Front whose backend always gives ANSWER."""
    return make_front(tokens_then_end(answer_ids, FinishReason.STOP), codec=codec)


@pytest.fixture
async def client(served):
    async with client_of(served[0]) as http:
        yield http


def error_of(response: httpx.Response) -> dict:
    """The error of a refusal, checked to have the shape that clients read."""
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert "Traceback" not in response.text
    return body["error"]


# Refusals ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "body"), PATHS)
@pytest.mark.parametrize("raw", ['{"model": "m", x}', "[]", "null", "123", '"s"', ""])
async def test_a_body_that_is_no_object_is_a_400(client, path, body, raw):
    """Rows 10 and 11."""
    response = await client.post(path, content=raw, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert error_of(response)["type"] == "invalid_request_error"
    assert (await client.post(path, json=body)).status_code == 200


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded"])
async def test_a_body_that_is_not_declared_as_json_is_a_415(client, content_type):
    """Row 12."""
    headers = {} if content_type is None else {"content-type": content_type}
    response = await client.post("/v1/completions", content=b"{}", headers=headers)
    assert response.status_code == 415
    assert error_of(response)["code"] == "unsupported_media_type"


@pytest.mark.parametrize(
    "content_type", ["application/json; charset=utf-8", "Application/JSON", "application/a+json"]
)
async def test_json_by_other_spellings_is_taken(client, content_type):
    content = httpx.Request("POST", "http://x", json=COMPLETION).content
    response = await client.post(
        "/v1/completions", content=content, headers={"content-type": content_type}
    )
    assert response.status_code == 200


async def test_a_body_above_the_limit_is_a_413(codec, answer_ids):
    front, _ = make_front(
        tokens_then_end(answer_ids), codec=codec, settings={"max_body_bytes": 200}
    )

    async def in_chunks():
        yield b'{"model": "'
        for _ in range(30):
            yield b"x" * 10

    async with client_of(front) as client:
        headers = {"content-type": "application/json"}
        for content in (b"x" * 201, in_chunks()):
            response = await client.post("/v1/completions", content=content, headers=headers)
            assert response.status_code == 413
            assert error_of(response)["code"] == "body_too_large"
        assert (await client.post("/v1/completions", json=COMPLETION)).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/v1/embeddings", 404),  # row 17
        ("POST", "/v1/responses", 404),
        ("GET", "/", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/chat/completions", 405),
        ("POST", "/v1/models", 405),
        ("GET", "/v1/models/none/such", 404),
    ],
)
async def test_what_is_not_served_is_refused_in_the_apis_shape(client, method, path, status):
    response = await client.request(method, path)
    assert response.status_code == status
    error_of(response)
    assert ("allow" in response.headers) == (status == 405)


@pytest.mark.parametrize(
    ("path", "fields", "param", "code"),
    [
        ("/v1/completions", {"prompt": ""}, "prompt", None),  # row 1
        ("/v1/completions", {"prompt": [""]}, "prompt", None),  # row 1
        ("/v1/completions", {"prompt": [5279552648203111001]}, "prompt", None),  # row 3
        ("/v1/completions", {"logit_bias": {"400": 5}}, "logit_bias", None),  # row 4
        ("/v1/chat/completions", {"logit_bias": {"AI": 1}}, "logit_bias", None),  # row 5
        ("/v1/chat/completions", {"max_tokens": 0}, "max_tokens", None),  # row 16
        ("/v1/completions", {"prompt_logprobs": -1}, "prompt_logprobs", None),  # row 22
        ("/v1/completions", {"prompt": "x " * 90}, "prompt", "context_length_exceeded"),  # row 25
        ("/v1/chat/completions", {"response_format": {"type": "yaml"}}, "response_format", None),
        ("/v1/chat/completions", {"frequency_penalty": 2.5}, "frequency_penalty", None),
        ("/v1/chat/completions", {"top_logprobs": 2}, "top_logprobs", None),
        ("/v1/completions", {"logprobs": 6}, "logprobs", None),
        ("/v1/completions", {"repetition_penalty": 0}, "repetition_penalty", None),
        ("/v1/chat/completions", {"max_tokenz": 2}, "max_tokenz", "unknown_parameter"),
        ("/v1/completions", {"model": "other"}, "model", "model_not_found"),
    ],
)
async def test_one_bad_request_is_refused_by_name_and_harms_no_other(
    served, client, path, fields, param, code
):
    body = dict(PATHS)[path]
    for stream in (False, True):
        response = await client.post(path, json={**body, **fields, "stream": stream})
        assert response.status_code == (404 if code == "model_not_found" else 400)
        error = error_of(response)
        assert error["param"] == param
        assert code in (None, error["code"])
    assert not served[1].requests
    assert (await client.post(path, json=body)).status_code == 200


async def test_the_templates_own_message_reaches_the_client(client):
    """Row 15."""
    messages = [{"role": "tool_use", "content": "x"}]
    response = await client.post("/v1/chat/completions", json={**CHAT, "messages": messages})
    error = error_of(response)
    assert (response.status_code, error["param"]) == (400, "messages")
    assert "role tool_use is not known" in error["message"]


@pytest.mark.parametrize("arguments", ["{bad", '{"a": 1}', ""])
@pytest.mark.parametrize("content", ["so", None])
async def test_history_with_tool_calls_is_rendered(client, arguments, content):
    """Rows 19 and 20."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    turn = {"role": "assistant", "content": content, "tool_calls": [call]}
    reply = {"role": "tool", "content": "x", "tool_call_id": "1"}
    response = await client.post("/v1/chat/completions", json={**CHAT, "messages": [turn, reply]})
    assert response.status_code == 200


async def test_chat_on_a_model_without_a_template_is_a_400(codec, answer_ids):
    front, _ = make_front(tokens_then_end(answer_ids), codec=codec, chat_template=None)
    async with client_of(front) as client:
        response = await client.post("/v1/chat/completions", json=CHAT)
        assert response.status_code == 400
        assert "no chat template" in error_of(response)["message"]
        assert (await client.post("/v1/completions", json=COMPLETION)).status_code == 200


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_a_limit_beyond_the_window_names_all_three_numbers(client, name):
    """Rows 24 and 26: the same for both names."""
    prompt = [5] * 8
    fits = {**COMPLETION, "prompt": prompt, name: WINDOW - 8}
    assert (await client.post("/v1/completions", json=fits)).status_code == 200
    response = await client.post("/v1/completions", json={**fits, name: WINDOW - 3})
    error = error_of(response)
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
    for number in (WINDOW, 8, WINDOW - 3):
        assert str(number) in error["message"]


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "soon", ""])
async def test_a_timeout_header_must_be_a_positive_number(client, value):
    headers = {"x-request-timeout-seconds": value}
    response = await client.post("/v1/completions", json=COMPLETION, headers=headers)
    assert response.status_code == 400
    assert error_of(response)["param"] == "x-request-timeout-seconds"


# Answers ----------------------------------------------------------------------------------------


async def test_an_omitted_limit_is_filled_in(served, client):
    """Row 44."""
    await client.post("/v1/completions", json=COMPLETION)
    assert served[1].requests[0].sampling.max_tokens == 24


async def test_choices_of_several_prompts_come_in_order(client):
    """Row 81: n is honoured."""
    body = {**COMPLETION, "prompt": ["hi", "ho"], "n": 2}
    answer = (await client.post("/v1/completions", json=body)).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]


async def test_a_stop_string_is_removed_and_the_reason_is_stop(client):
    """Row 33."""
    answer = (await client.post("/v1/completions", json={**COMPLETION, "stop": "END"})).json()
    (choice,) = answer["choices"]
    assert choice["text"] == ANSWER.partition("END")[0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "END")


@pytest.mark.parametrize(
    ("sent", "returned"),
    [
        ("abc-1", "abc-1"),
        ("a b\tc", "abc"),
        ("x" * 300, "x" * 128),
        ('"quoted"', '"quoted"'),
    ],
)
async def test_the_clients_request_id_comes_back_sanitised(client, sent, returned):
    headers = {"x-request-id": sent}
    response = await client.post("/v1/completions", json=COMPLETION, headers=headers)
    assert response.headers["x-request-id"] == returned
    assert response.json()["id"] == f"cmpl-{returned}"
    refused = await client.post("/v1/completions", json={}, headers=headers)
    assert refused.headers["x-request-id"] == returned


async def test_a_request_without_an_id_gets_one(client):
    ids = {(await client.get(path)).headers["x-request-id"] for path in ("/health", "/nothing")}
    ids.add((await client.get("/health", headers={"x-request-id": " "})).headers["x-request-id"])
    assert len(ids) == 3


async def test_the_models_are_listed(client):
    (model,) = (await client.get("/v1/models")).json()["data"]
    assert (model["id"], model["max_model_len"]) == (MODEL, WINDOW)
    assert (await client.get(f"/v1/models/{MODEL}")).json() == model


async def test_health_is_the_process_and_ready_is_the_workers(served, client):
    """Row 124."""
    assert (await client.get("/ready")).status_code == 200
    served[1].ready = False
    response = await client.get("/ready")
    assert response.status_code == 503
    assert error_of(response)["code"] == "not_ready"
    assert response.headers["retry-after"]
    assert (await client.get("/health")).status_code == 200
    assert (await client.get("/version")).json() == {"version": "0.0"}


async def test_the_api_document_describes_the_bodies(client):
    document = (await client.get("/openapi.json")).json()
    assert "/v1/chat/completions" in document["paths"]
    assert "max_completion_tokens" in document["components"]["schemas"]["ChatBody"]["properties"]
    assert (await client.get("/docs")).status_code == 200


async def test_one_scrape_shows_this_front_and_the_workers(codec, answer_ids):
    async def peers():
        samples = (sample("baton_queue_length", 3),)
        return [WorkerSnapshot(worker_id="decode-0", role="decode", samples=samples)]

    front, _ = make_front(tokens_then_end(answer_ids), codec=codec, peer_snapshots=peers)
    async with client_of(front) as client:
        await client.post("/v1/completions", json=COMPLETION)
        await client.post("/v1/completions", json={})
        response = await client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    lines = response.text.splitlines()
    own = 'role="front",worker="front-0"'
    for line in (
        f'baton_requests_total{{endpoint="completions",outcome="2xx",{own}}} 1.0',
        f'baton_requests_total{{endpoint="completions",outcome="4xx",{own}}} 1.0',
        f'baton_requests_in_flight{{endpoint="completions",{own}}} 0.0',
        f'baton_ttft_seconds_count{{endpoint="completions",{own}}} 1.0',
        'baton_queue_length{role="decode",worker="decode-0"} 3.0',
    ):
        assert line in lines


# Failures of the backend ------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("step", "status"),
    [
        (Failed(attempt=0, code=FailureCode.QUEUE_FULL, message="full", retry_after_s=7.0), 429),
        (Failed(attempt=0, code=FailureCode.DEADLINE_EXCEEDED, message="late"), 504),
        (Failed(attempt=0, code=FailureCode.WORKER_LOST, message="lost"), 503),  # row 113
        (Failed(attempt=0, code=FailureCode.WORKER_STOPPING, message="stopping"), 503),
        (Failed(attempt=0, code=FailureCode.CONTEXT_LENGTH_EXCEEDED, message="long"), 400),  # 51
        (Failed(attempt=0, code=FailureCode.INTERNAL, message="secret text"), 500),
        (RuntimeError("secret text"), 500),
    ],
)
async def test_a_failure_before_the_first_token_has_its_status(codec, step, status, stream):
    """Rows 50 and 51, with and without a stream."""
    front, backend = make_front(lambda _: [step], codec=codec)
    async with client_of(front) as client:
        response = await client.post("/v1/chat/completions", json={**CHAT, "stream": stream})
    assert response.status_code == status
    error_of(response)
    assert "secret" not in response.text
    if status == 429:
        assert response.headers["retry-after"] == "7"
    assert backend.num_open == 0


async def test_a_failure_of_one_choice_fails_a_whole_answer(codec):
    """Row 50: an answer without a stream is whole or an error."""

    def script(request: GenerateRequest) -> list[Step]:
        if request.request_id.endswith("-1"):
            return [frame(50), Failed(attempt=0, code=FailureCode.WORKER_LOST, message="lost")]
        return [frame(50), asyncio.Event()]

    front, backend = make_front(script, codec=codec)
    async with client_of(front) as client:
        response = await client.post("/v1/completions", json={**COMPLETION, "n": 2})
    assert response.status_code == 503
    assert backend.num_open == 0


async def test_an_unexpected_error_is_logged_once_and_hidden(codec, caplog):
    front, _ = make_front(lambda _: [RuntimeError("the reason")], codec=codec)
    async with client_of(front) as client:
        response = await client.post("/v1/completions", json=COMPLETION)
    assert error_of(response)["code"] == "internal"
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(errors) == 1
    assert response.headers["x-request-id"] in errors[0].getMessage()
    assert "hi" not in caplog.text.split()  # the prompt


async def test_the_deadline_of_the_header_holds(codec):
    front, backend = make_front(lambda _: [asyncio.Event()], codec=codec)
    async with client_of(front) as client:
        response = await client.post(
            "/v1/completions", json=COMPLETION, headers={"x-request-timeout-seconds": "0.05"}
        )
    assert response.status_code == 504
    assert error_of(response)["code"] == "deadline_exceeded"
    assert backend.requests[0].timeout_s <= 0.045  # the error must be through before the cut


async def test_a_client_cannot_ask_for_more_time_than_the_server_gives(codec, answer_ids):
    front, backend = make_front(
        tokens_then_end(answer_ids), codec=codec, settings={"request_timeout_s": 9.0}
    )
    async with client_of(front) as client:
        await client.post(
            "/v1/completions", json=COMPLETION, headers={"x-request-timeout-seconds": "99"}
        )
    assert 8 < backend.requests[0].timeout_s <= 8.75


# The official client ----------------------------------------------------------------------------


@pytest.fixture
async def official(served):
    transport = httpx.ASGITransport(build_app(served[0]))
    async with (
        httpx.AsyncClient(transport=transport, base_url="http://front") as http,
        openai.AsyncOpenAI(
            api_key="none", base_url="http://front/v1", http_client=http, max_retries=0
        ) as client,
    ):
        yield client


async def test_the_official_client_chats(official):
    answer = await official.chat.completions.create(**CHAT)
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    follow_up = [*CHAT["messages"], answer.choices[0].message, CHAT["messages"][0]]
    again = await official.chat.completions.create(model=MODEL, messages=follow_up)
    assert again.choices[0].message.content == ANSWER


async def test_the_official_client_streams(official):
    stream = await official.chat.completions.create(
        **CHAT, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    *texts, last = chunks
    assert "".join(chunk.choices[0].delta.content or "" for chunk in texts) == ANSWER
    assert texts[-1].choices[0].finish_reason == "stop"
    assert (last.choices, last.usage.completion_tokens > 0) == ([], True)


async def test_the_official_client_completes(official):
    answer = await official.completions.create(**COMPLETION, n=2, stop=["END"], seed=-5)
    assert [choice.text for choice in answer.choices] == [ANSWER.partition("END")[0]] * 2
    stream = await official.completions.create(**COMPLETION, stream=True)
    text = "".join([chunk.choices[0].text async for chunk in stream])
    assert text == ANSWER


async def test_the_official_client_understands_refusals(official):
    with pytest.raises(openai.BadRequestError) as caught:
        await official.chat.completions.create(**CHAT, response_format={"type": "json_object"})
    assert (caught.value.param, caught.value.code) == ("response_format", "unsupported_parameter")
    with pytest.raises(openai.NotFoundError):
        await official.models.retrieve("other")
    assert [model.id async for model in official.models.list()] == [MODEL]


async def test_the_official_client_sees_an_error_inside_a_stream(codec, answer_ids):
    """Row 48."""
    lost = Failed(attempt=0, code=FailureCode.WORKER_LOST, message="lost")
    front, _ = make_front(lambda _: [*frames(answer_ids[:3]), lost], codec=codec)
    transport = httpx.ASGITransport(build_app(front))
    async with (
        httpx.AsyncClient(transport=transport, base_url="http://front") as http,
        openai.AsyncOpenAI(
            api_key="none", base_url="http://front/v1", http_client=http, max_retries=0
        ) as client,
    ):
        stream = await client.chat.completions.create(**CHAT, stream=True)
        with pytest.raises(openai.APIError):
            _ = [chunk async for chunk in stream]


async def test_a_finished_sequence_reports_what_was_cached(codec, answer_ids):
    """Row 119."""

    def script(request: GenerateRequest) -> list[Step]:
        return [frame(*answer_ids), finished(request, len(answer_ids), cached_tokens=1)]

    front, _ = make_front(script, codec=codec)
    async with client_of(front) as client:
        usage = (await client.post("/v1/completions", json=COMPLETION)).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 1}
    assert usage["completion_tokens"] == len(answer_ids)
