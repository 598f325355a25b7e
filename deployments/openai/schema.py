"""The bodies of /v1/completions and /v1/chat/completions, checked field by field.

A parameter has its effect, or asks for nothing (null, or its neutral value), or is an error that
names it: none is dropped in silence but the few that OpenAI's service keeps for its own records.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from deployments.openai.body import OtherFields, parse
from deployments.openai.errors import InvalidRequestError

__all__ = [
    "Body",
    "ChatBody",
    "ChatMessage",
    "CompletionBody",
    "GenerationBody",
    "Prompt",
    "StreamOptions",
    "parse_chat",
    "parse_completion",
    "template_message",
]

Prompt = str | tuple[int, ...]
"""Text, or the token ids of it."""

_TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")
MAX_STOPS = 16
MAX_LOGPROBS = 20
MAX_BIAS = 100
MAX_BIASED_TOKENS = 1024
MAX_CHOICES = 128
"""Of any server; `limits.max_choices` is that of one."""
_INT32_MAX = 2**31 - 1
_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1


def _invalid(message: str) -> PydanticCustomError:
    return PydanticCustomError("invalid", "{reason}", {"reason": message})


def _is_token_ids(value: list[Any]) -> bool:
    return all(type(item) is int and item >= 0 for item in value)


def _prompts(value: Any) -> tuple[Prompt, ...]:
    """All four forms of `prompt` as a tuple of prompts."""
    if isinstance(value, str):
        prompts: list[Prompt] = [value]
    elif not isinstance(value, list):
        raise _invalid("must be a string, strings, token ids, or lists of token ids")
    elif value and all(isinstance(item, str) for item in value):
        prompts = [*value]
    elif value and all(isinstance(item, list) and _is_token_ids(item) for item in value):
        prompts = [tuple(item) for item in value]
    elif _is_token_ids(value):
        prompts = [tuple(value)]
    else:
        raise _invalid("must hold only strings, only token ids (integers from 0), or only lists")
    if not all(prompts):
        raise _invalid("must not be empty")
    return tuple(prompts)


def _stops(value: Any) -> tuple[str, ...]:
    """`stop` as a tuple of strings; null stops nowhere."""
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise _invalid("must be a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise _invalid(f"at most {MAX_STOPS} stop strings, not {len(stops)}")
    if not all(stops):
        raise _invalid("a stop string must not be empty")
    return tuple(dict.fromkeys(stops))


def _logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    """`logit_bias` as (token id, bias) pairs; JSON has ids as names, so as strings."""
    if value is not None and not isinstance(value, dict):
        raise _invalid("must be an object of token ids and numbers")
    biases = value or {}
    if len(biases) > MAX_BIASED_TOKENS:
        raise _invalid(f"at most {MAX_BIASED_TOKENS} tokens, not {len(biases)}")
    for name, bias in biases.items():
        if not _TOKEN_ID.fullmatch(name):
            raise _invalid(f"{name[:32]!r} is not a token id")
        if not _is_number(bias) or not -MAX_BIAS <= bias <= MAX_BIAS:
            raise _invalid(f"the bias of token {name} must be a number from -100 to 100")
    return tuple((int(name), float(bias)) for name, bias in biases.items())


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _content(value: Any) -> str | None:
    """A message's text; its text parts follow each other without anything in between."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise _invalid("must be a string or a list of parts")
    return "".join(_part_text(part) for part in value)


def _part_text(part: Any) -> str:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise _invalid("each part must be an object with a type")
    if part["type"] != "text":
        raise _invalid("only parts of type 'text' are supported")
    if set(part) != {"type", "text"} or not isinstance(part["text"], str):
        raise _invalid("a text part has exactly a type and a text, which is a string")
    return part["text"]


_TEXT_OR_TEXTS: dict[str, Any] = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]
}
_TOKEN_IDS: dict[str, Any] = {"type": "array", "items": {"type": "integer", "minimum": 0}}

_PromptField = Annotated[
    tuple[Prompt, ...],
    PlainValidator(_prompts),
    WithJsonSchema(
        {"anyOf": [*_TEXT_OR_TEXTS["anyOf"], _TOKEN_IDS, {"type": "array", "items": _TOKEN_IDS}]}
    ),
]
_StopField = Annotated[
    tuple[str, ...],
    PlainValidator(_stops),
    WithJsonSchema({"anyOf": [*_TEXT_OR_TEXTS["anyOf"], {"type": "null"}]}),
]
_ContentField = Annotated[
    str | None,
    PlainValidator(_content),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "object"}},
                {"type": "null"},
            ]
        }
    ),
]
_TokenId = Annotated[int, Field(ge=0)]


_LogitBiasField = Annotated[
    tuple[tuple[int, float], ...],
    PlainValidator(_logit_bias),
    WithJsonSchema(
        {
            "anyOf": [
                {
                    "type": "object",
                    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
                    "maxProperties": MAX_BIASED_TOKENS,
                },
                {"type": "null"},
            ]
        }
    ),
]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class StreamOptions(_Strict):
    """What a stream carries besides text."""

    include_usage: bool | None = Field(None, description="One last chunk with the usage.")
    continuous_usage_stats: bool | None = Field(
        None, description="The usage so far in every chunk."
    )
    include_obfuscation: Literal[False] | None = None


class GenerationBody(_Strict):
    """The parameters that both endpoints have."""

    model: str = Field(min_length=1, max_length=512)
    max_tokens: int | None = Field(
        None,
        ge=1,
        le=_INT32_MAX,
        description="Output tokens at most; prompt and max_tokens together must fit the window.",
    )
    max_completion_tokens: int | None = Field(
        None, ge=1, le=_INT32_MAX, description="Another name of max_tokens."
    )
    min_tokens: int | None = Field(
        None, ge=0, le=_INT32_MAX, description="No stop has an effect before so many output tokens."
    )
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=_INT32_MAX, description="0 and -1 keep all tokens.")
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(
        None, gt=0, le=100, description="Of tokens in prompt and output; 1 has no effect."
    )
    frequency_penalty: float | None = Field(
        None, ge=-2, le=2, description="Of output tokens, for each time that they came."
    )
    presence_penalty: float | None = Field(None, ge=-2, le=2, description="Of output tokens, once.")
    logit_bias: _LogitBiasField = ()
    prompt_logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_LOGPROBS,
        description="Log-probabilities of prompt tokens, with so many alternatives.",
    )
    return_tokens_as_token_ids: bool | None = Field(
        None, description="Tokens in logprobs are written token_id:N; needs logprobs."
    )
    seed: int | None = Field(None, ge=_INT64_MIN, le=_INT64_MAX)
    stop: _StopField = ()
    stop_token_ids: list[_TokenId] | None = Field(None, max_length=256)
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = Field(
        None, ge=-100, le=100, description="Place in the queue: smaller values are served earlier."
    )
    cache_salt: str | None = Field(
        None,
        min_length=1,
        max_length=512,
        repr=False,
        description="KV is shared only among requests with the same salt; a tenant's secret.",
    )


class CompletionBody(GenerationBody):
    """The body of POST /v1/completions."""

    prompt: _PromptField
    max_tokens: int | None = Field(
        None,
        ge=0,
        le=_INT32_MAX,
        description="As in chat; 0 is allowed with echo: the prompt alone is answered.",
    )
    echo: bool | None = Field(None, description="The text begins with the prompt.")
    logprobs: int | None = Field(
        None,
        ge=0,
        le=5,
        description="Log-probabilities of the text's tokens, with so many alternatives.",
    )

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives of each token of the text; None if no log-probabilities are asked for."""
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Alternatives of each prompt token that are needed, for whichever field."""
        echoed = self.logprobs if self.echo else None
        asked = [number for number in (self.prompt_logprobs, echoed) if number is not None]
        return max(asked, default=None)


class ChatMessage(_Strict):
    """One message; which roles there are is for the model's chat template to say."""

    role: str = Field(min_length=1, max_length=64)
    content: _ContentField = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    # A client that sends back an answer as it got it sends these too, without a value.
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None


class ChatBody(GenerationBody):
    """The body of POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1)
    logprobs: bool | None = Field(None, description="Log-probabilities of the text's tokens.")
    top_logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="Alternatives of each; needs logprobs."
    )

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives of each token of the text; None if no log-probabilities are asked for."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Alternatives of each prompt token."""
        return self.prompt_logprobs


Body = CompletionBody | ChatBody
AnyBody = TypeVar("AnyBody", CompletionBody, ChatBody)


_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "include_stop_str_in_output": (False,),
    "spaces_between_special_tokens": (True,),
    "add_special_tokens": (),
    "truncate_prompt_tokens": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "logits_processors": (),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
}
_IGNORED = (
    "user",
    "metadata",
    "store",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
)
_COMPLETION = OtherFields(
    neutral={**_NEUTRAL, "suffix": ("",), "best_of": (1,)},
    ignored=_IGNORED,
    nested={"stream_options": StreamOptions},
)
_CHAT = OtherFields(
    neutral={
        **_NEUTRAL,
        "echo": (False,),
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "parallel_tool_calls": (True, False),
        "functions": ([],),
        "function_call": ("none",),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "reasoning_effort": ("none",),
        "verbosity": (),
        "web_search_options": (),
        "service_tier": ("auto", "default"),
        "chat_template": (),
        "chat_template_kwargs": ({},),
        "add_generation_prompt": (True,),
        "continue_final_message": (False,),
        "documents": ([],),
        "moderation": (),
    },
    ignored=_IGNORED,
    nested={"stream_options": StreamOptions, "messages": ChatMessage},
)


def parse_completion(body: Mapping[str, Any]) -> CompletionBody:
    """Check a completions body; `InvalidRequestError` names what is wrong."""
    checked = _checked(parse(CompletionBody, body, _COMPLETION))
    if checked.max_tokens == 0 and not checked.echo:
        raise InvalidRequestError("must be at least 1 without echo", param="max_tokens")
    return checked


def parse_chat(body: Mapping[str, Any]) -> ChatBody:
    """Check a chat completions body; `InvalidRequestError` names what is wrong."""
    checked = _checked(parse(ChatBody, body, _CHAT))
    if checked.top_logprobs and not checked.logprobs:
        raise InvalidRequestError(
            "top_logprobs are allowed only when logprobs is true", param="top_logprobs"
        )
    return checked


def template_message(message: ChatMessage) -> dict[str, Any]:
    """A message as chat templates expect it: absent fields absent, the content always a string."""
    fields: dict[str, Any] = {"role": message.role, "content": message.content or ""}
    if message.name is not None:
        fields["name"] = message.name
    if message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        fields["tool_calls"] = [_template_call(call) for call in message.tool_calls]
    return fields


def _template_call(call: dict[str, Any]) -> dict[str, Any]:
    """A tool call with its arguments as an object; text that is none is passed through."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    if not isinstance(arguments, dict):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _checked(body: AnyBody) -> AnyBody:
    """What concerns more than one field."""
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError(
            "stream_options are allowed only when stream is true", param="stream_options"
        )
    if body.return_tokens_as_token_ids and body.num_logprobs is None:
        raise InvalidRequestError(
            "return_tokens_as_token_ids is allowed only with logprobs",
            param="return_tokens_as_token_ids",
        )
    limits = (body.max_tokens, body.max_completion_tokens)
    if None not in limits and limits[0] != limits[1]:
        raise InvalidRequestError(
            f"max_tokens is {limits[0]} and max_completion_tokens {limits[1]}: they mean the same",
            param="max_completion_tokens",
        )
    return body
