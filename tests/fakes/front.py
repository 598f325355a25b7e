"""A Front without Ray: all of it real but the backend, which plays a script."""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import cache
from typing import Any

import httpx
from tokenizers import Tokenizer

from deployments.front_service import FrontService, FrontSettings, ServedModel, Sources
from deployments.http_app import build_app
from deployments.metrics import FrontMetrics, WorkerSnapshot
from deployments.openai.models import ModelCard
from deployments.pipeline import Backend
from deployments.text.chat import ChatEncoder
from deployments.text.tokenizer import TextTokenizer
from router.agent_step import AgentStep
from router.policy import Decision
from tests.fakes.backend import FakeBackend, Step
from tests.fakes.tokenizer import byte_level_tokenizer
from workers.messages import GenerateRequest
from workers.runner_choice import RunnerChoice

__all__ = [
    "EOS",
    "MODEL",
    "TEMPLATE",
    "WINDOW",
    "FakePolicy",
    "client_of",
    "ids_of",
    "make_codec",
    "make_front",
]

MODEL = "tiny"
WINDOW = 128
EOS = 1
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('role ' + message.role + ' is not known') }}{% endif %}"
    "<|start|>{{ message.role }} {{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}"
    "<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant {% endif %}"
)


class FakePolicy:
    """Sends everything to one pool and remembers what it was asked."""

    def __init__(self) -> None:
        self.steps: list[AgentStep] = []

    def decide(self, agent_step: AgentStep) -> Decision:
        """See `RoutePolicy.decide`."""
        self.steps.append(agent_step)
        return Decision(pool="main", reason="fixed")


async def _no_peers() -> Sequence[WorkerSnapshot]:
    return ()


@cache
def _tokenizer() -> Tokenizer:
    return byte_level_tokenizer()


def make_codec(executor: Executor | None = None) -> TextTokenizer:
    """A byte-level tokenizer; its texts in tests are short, so the executor stays idle."""
    return TextTokenizer(_tokenizer(), executor or ThreadPoolExecutor(1))


def ids_of(text: str) -> tuple[int, ...]:
    """The ids that the codec gives a text."""
    return tuple(_tokenizer().encode(text).ids)


def make_front(
    script: Callable[[GenerateRequest], Iterable[Step]],
    *,
    codec: TextTokenizer,
    chat_template: str | None = TEMPLATE,
    card: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
    policy: FakePolicy | None = None,
    peer_snapshots: Callable[[], Awaitable[Sequence[WorkerSnapshot]]] = _no_peers,
    clock: Callable[[], float] = time.monotonic,
    in_front: Callable[[FakeBackend], Backend] = lambda backend: backend,
) -> tuple[FrontService, FakeBackend]:
    """A Front that serves MODEL, and the backend behind it: at once, or behind another one."""
    backend = FakeBackend(script)
    facts: dict[str, Any] = {
        "name": MODEL,
        "window": WINDOW,
        "vocab_size": codec.vocab_size,
        "eos_token_ids": frozenset({EOS}),
        "runner": RunnerChoice(tier="stock", cause="by_hand", reason="it is a fake"),
        "default_max_tokens": 24,
    }
    model = ServedModel(
        card=ModelCard(**{**facts, **(card or {})}),
        codec=codec,
        chat=ChatEncoder(chat_template, special_tokens={}),
    )
    front = FrontService(
        models=[model],
        backends={"main": in_front(backend)},
        policy=policy or FakePolicy(),
        settings=FrontSettings(**{"version": "0.0", **(settings or {})}),
        metrics=FrontMetrics("front-0"),
        sources=Sources(clock=clock, wall_clock=time.time, rng=random.Random(1)),
        peer_snapshots=peer_snapshots,
    )
    return front, backend


def client_of(front: FrontService) -> httpx.AsyncClient:
    """A client that talks to the application in this process."""
    transport = httpx.ASGITransport(build_app(front))
    return httpx.AsyncClient(transport=transport, base_url="http://front")
