"""What Front does with a request before and around its `Run`; knows neither HTTP nor Ray.

prepare   body -> Generation: whatever can be refused without a worker is refused here
start     Generation -> Run
"""

from __future__ import annotations

import math
import random
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Protocol

from deployments.metrics import FrontMetrics, WorkerSnapshot, loop_sample, render
from deployments.openai.errors import InvalidRequestError, UnknownModelError
from deployments.openai.models import ModelCard
from deployments.openai.sampling import SEED_BITS, check_prompt_ids, choice_seed, sampling_params
from deployments.openai.schema import (
    Body,
    ChatBody,
    CompletionBody,
    Prompt,
    StreamOptions,
    parse_chat,
    parse_completion,
    template_message,
)
from deployments.pipeline import Backend, Run, SequencePlan
from deployments.text.sequence_text import TextOptions
from router.agent_step import AgentStep
from router.policy import Decision
from workers.engine.sampling_params import SamplingParams
from workers.messages import GenerateRequest
from workers.runner_choice import RunnerChoice

__all__ = [
    "ChatTemplate",
    "Endpoint",
    "FrontService",
    "FrontSettings",
    "Generation",
    "RoutePolicy",
    "ServedModel",
    "Sources",
    "TextCodec",
]

Endpoint = Literal["completions", "chat_completions"]

_ASK_RUNNERS_EVERY_S = 5.0
"""At most: clients that poll `/v1/models` shall cost workers nothing to speak of."""


class TextCodec(Protocol):
    """The model's tokenizer."""

    async def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """Token ids of a text."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids."""

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 text of one token; part of a character for some."""


class ChatTemplate(Protocol):
    """How the model wants to read a conversation."""

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt text; raises `InvalidRequestError` for messages it does not take."""


class RoutePolicy(Protocol):
    """Which pool serves an agent step."""

    def decide(self, agent_step: AgentStep) -> Decision:
        """The pool, by its name in `backends`, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model and what turns its text into ids and back."""

    card: ModelCard
    codec: TextCodec
    chat: ChatTemplate


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontSettings:
    """Limits and times of the HTTP surface."""

    version: str
    keep_alive_s: float = 10.0
    """A stream is never silent for longer."""
    request_timeout_s: float = 600.0
    """A client may ask for less, not for more."""
    max_body_bytes: int = 8 * 2**20
    echoes_request_id: bool = True
    """False where the HTTP server around the application does that: one header, not two."""
    max_sequences: int = 128
    """Prompts x n of one request."""
    max_choices: int = 16
    """n at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Where time and randomness come from."""

    clock: Callable[[], float]
    """Monotonic seconds."""
    wall_clock: Callable[[], float]
    """Seconds since 1970."""
    rng: random.Random


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A request that is checked, encoded and routed."""

    request_id: str
    endpoint: Endpoint
    model: str
    pool: str
    has_logprobs: bool
    has_token_ids: bool
    """Whether tokens in log-probabilities are named by id."""
    plans: tuple[SequencePlan, ...]
    is_stream: bool
    include_usage: bool
    continuous_usage: bool
    arrived_at: float
    deadline: float
    """On Front's clock."""


class FrontService:
    """The service behind the HTTP application; one in each Front process."""

    def __init__(
        self,
        *,
        models: Iterable[ServedModel],
        backends: Mapping[str, Backend],
        policy: RoutePolicy,
        settings: FrontSettings,
        metrics: FrontMetrics,
        sources: Sources,
        peer_snapshots: Callable[[], Awaitable[Sequence[WorkerSnapshot]]],
    ) -> None:
        """`peer_snapshots` gives the snapshots of all workers and of the other Fronts."""
        self.settings = settings
        self.metrics = metrics
        self.clock = sources.clock
        self.wall_clock = sources.wall_clock
        self._models = {model.card.name: model for model in models}
        self._backends = dict(backends)
        self._policy = policy
        self._rng = sources.rng
        self._peer_snapshots = peer_snapshots
        self._runners: Mapping[str, RunnerChoice] = {}
        self._ask_runners_at = -math.inf

    @property
    def cards(self) -> tuple[ModelCard, ...]:
        """The served models."""
        return tuple(model.card for model in self._models.values())

    def model(self, name: str) -> ServedModel:
        """A served model by name; raises `UnknownModelError`."""
        if name not in self._models:
            served = ", ".join(self._models)
            raise UnknownModelError(f"no such model is served; there is: {served}", param="model")
        return self._models[name]

    def new_request_id(self) -> str:
        """For a request that brings none."""
        return uuid.UUID(int=self._rng.getrandbits(128), version=4).hex

    async def is_ready(self) -> bool:
        """Whether every pool would serve a request now."""
        return all([await backend.is_ready() for backend in self._backends.values()])

    def snapshot(self) -> WorkerSnapshot:
        """This Front's share of `/metrics`; only on its event loop."""
        counted = self.metrics.snapshot()
        return replace(counted, samples=(*counted.samples, loop_sample()))

    async def metrics_text(self) -> str:
        """All metrics of this Front, the other Fronts and all workers, for a scrape."""
        return render([self.snapshot()], await self._peer_snapshots())

    async def runners(self) -> Mapping[str, RunnerChoice]:
        """How each worker, by its id, said that it runs the model; empty before any has.

        A worker's choice never changes, but others may take its place: all are asked again now and
        then, and what was said holds while nobody answers.
        """
        if self.clock() >= self._ask_runners_at:
            said = {
                snapshot.worker_id: snapshot.runner
                for snapshot in await self._peer_snapshots()
                if snapshot.runner is not None
            }
            self._runners = said or self._runners
            self._ask_runners_at = self.clock() + _ASK_RUNNERS_EVERY_S
        return self._runners

    async def prepare(
        self,
        endpoint: Endpoint,
        body: Mapping[str, Any],
        *,
        request_id: str,
        arrived_at: float,
        timeout_s: float,
    ) -> Generation:
        """Check, encode and route; raises an `ApiError` for what cannot be served."""
        if endpoint == "completions":
            checked: Body = parse_completion(body)
        else:
            checked = parse_chat(body)
        model = self.model(checked.model)
        prompts = await self._encode(model, checked)
        plans = self._plans(model, checked, prompts, request_id)
        return self._route(endpoint, checked, plans, request_id, arrived_at, timeout_s)

    def start(self, generation: Generation) -> Run:
        """The request's run; it begins when it is entered."""
        return Run(
            plans=generation.plans,
            backend=self._backends[generation.pool],
            observer=self.metrics.request_observer(generation.endpoint),
            clock=self.clock,
            arrived_at=generation.arrived_at,
            deadline=generation.deadline,
        )

    async def _encode(self, model: ServedModel, body: Body) -> list[tuple[int, ...]]:
        """The token ids of each prompt."""
        if isinstance(body, ChatBody):
            text = model.chat.render([template_message(message) for message in body.messages])
            # The template writes the model's start tokens itself.
            return [await model.codec.encode(text, add_special_tokens=False)]
        self._check_size(len(body.prompt), body.n or 1)
        return [await self._encode_prompt(model, prompt) for prompt in body.prompt]

    async def _encode_prompt(self, model: ServedModel, prompt: Prompt) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return await model.codec.encode(prompt, add_special_tokens=True)
        check_prompt_ids(prompt, model.card)
        return prompt

    def _plans(
        self,
        model: ServedModel,
        body: Body,
        prompts: Sequence[tuple[int, ...]],
        request_id: str,
    ) -> tuple[SequencePlan, ...]:
        """One plan for each choice: all of the first prompt, then all of the second ..."""
        num_choices = body.n or 1
        self._check_size(len(prompts), num_choices)
        texts = [
            _text_options(model.codec, body, number, token_ids)
            for number, token_ids in enumerate(prompts)
        ]
        # A client may use one request id twice at a time; a worker must not mix the two up.
        unique_id = f"{request_id}-{self._rng.getrandbits(32):08x}"
        return tuple(
            SequencePlan(
                index=index,
                prompt_index=index // num_choices,
                request=GenerateRequest(
                    request_id=f"{unique_id}-{index}",
                    prompt_token_ids=prompts[index // num_choices],
                    sampling=sampling,
                    priority=body.priority or 0,
                    cache_salt=body.cache_salt or "",
                ),
                text=texts[index // num_choices],
            )
            for index, sampling in enumerate(self._samplings(model.card, body, prompts))
        )

    def _samplings(
        self, card: ModelCard, body: Body, prompts: Sequence[tuple[int, ...]]
    ) -> Iterator[SamplingParams]:
        """The sampling of each choice, in order."""
        param = "messages" if isinstance(body, ChatBody) else "prompt"
        for token_ids in prompts:
            # A given seed gives a prompt the same text alone and in a list; a drawn one gives two
            # equal prompts in a list two different texts.
            seed = self._rng.getrandbits(SEED_BITS) if body.seed is None else body.seed
            for choice in range(body.n or 1):
                yield sampling_params(
                    body,
                    card,
                    prompt_tokens=len(token_ids),
                    prompt_param=param,
                    seed=choice_seed(seed, choice),
                )

    def _check_size(self, prompts: int, choices: int) -> None:
        if choices > self.settings.max_choices:
            raise InvalidRequestError(
                f"n is {choices}; this server makes {self.settings.max_choices} at most", param="n"
            )
        if prompts * choices > self.settings.max_sequences:
            raise InvalidRequestError(
                f"{prompts} prompts with {choices} choices each are more than the "
                f"{self.settings.max_sequences} sequences of one request",
                param="prompt",
            )

    def _route(
        self,
        endpoint: Endpoint,
        body: Body,
        plans: tuple[SequencePlan, ...],
        request_id: str,
        arrived_at: float,
        timeout_s: float,
    ) -> Generation:
        decision = self._policy.decide(
            AgentStep(
                request_id=request_id,
                model=body.model,
                prompt_tokens=max(len(plan.request.prompt_token_ids) for plan in plans),
                max_tokens=max(plan.request.sampling.max_tokens for plan in plans),
            )
        )
        options = body.stream_options or StreamOptions()
        return Generation(
            request_id=request_id,
            endpoint=endpoint,
            model=body.model,
            pool=decision.pool,
            has_logprobs=body.num_logprobs is not None,
            has_token_ids=bool(body.return_tokens_as_token_ids),
            plans=plans,
            is_stream=bool(body.stream),
            include_usage=bool(options.include_usage),
            continuous_usage=bool(options.continuous_usage_stats),
            arrived_at=arrived_at,
            deadline=arrived_at + timeout_s,
        )


def _text_options(
    codec: TextCodec, body: Body, number: int, token_ids: tuple[int, ...]
) -> TextOptions:
    """What the choices of the prompt of that number show."""
    decode = partial(codec.decode, skip_special_tokens=body.skip_special_tokens is not False)
    is_echoed, text = False, ""
    if isinstance(body, CompletionBody) and (body.echo or body.logprobs is not None):
        is_echoed = bool(body.echo)
        given = body.prompt[number]
        text = given if isinstance(given, str) else decode(given)
    return TextOptions(
        decode=decode,
        token_bytes=codec.token_bytes,
        stops=body.stop,
        min_tokens=body.min_tokens or 0,
        stop_token_ids=frozenset(body.stop_token_ids or ()),
        num_logprobs=body.num_logprobs,
        num_prompt_logprobs=body.prompt_logprobs,
        prompt_token_ids=token_ids,
        prompt_text=text,
        is_echoed=is_echoed,
        has_output=body.max_tokens != 0,
    )
