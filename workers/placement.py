"""Decides where a prompt is computed: on the decode worker that has the request, or on prefill.

Two costs in seconds are compared, both from measurements. Here: until the worker has computed what
is queued and what is missing, and, for each stream that decodes there, what it waits meanwhile.
There: the prefill pool's queue, the prompt less what the pool has been finding of prompts, and what
a hand-off adds. Owns what is known of the prefill pool; reads no clock, talks to nobody.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Literal

from kv_transfer.geometry import ceil_div
from workers.engine.pace import Load
from workers.fading import FadingLine, FadingRatio
from workers.messages import PrefillLoad

__all__ = [
    "PLACES",
    "Decision",
    "Forecast",
    "Place",
    "PlacementConfig",
    "PlacementRule",
    "PrefillOutlook",
    "Prompt",
    "Reason",
]

Place = Literal["local", "remote", "fallback"]

_HALF_LIFE_HANDOFFS = 8.0
_HALF_LIFE_PROMPT_TOKENS = 8192.0


class Reason(Enum):
    """Why a prompt was computed where it was."""

    ALONE = "alone"
    """There is no prefill pool."""
    RESTING = "resting"
    """The prefill pool did not answer lately, or nothing of it can be fetched."""
    SHORT = "short"
    """No more than the floor is missing."""
    CHEAPER = "cheaper"
    """By the measured costs."""
    UNMEASURED = "unmeasured"
    """Nothing, or nothing recent, is known of the prefill pool: handing over brings it."""
    SETTING = "setting"
    """Every prompt above the floor is handed over."""
    FAILED = "failed"
    """The hand-off."""


PLACES: Mapping[Place, tuple[Reason, ...]] = MappingProxyType(
    {
        "local": (Reason.ALONE, Reason.RESTING, Reason.SHORT, Reason.CHEAPER),
        "remote": (Reason.CHEAPER, Reason.UNMEASURED, Reason.SETTING),
        "fallback": (Reason.FAILED,),
    }
)
"""The reasons that lead to each place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementConfig:
    """The rule, and what it rests on."""

    local_prefill_tokens: int
    """With so many missing or fewer, a prompt is computed here whatever the costs."""
    is_by_cost: bool
    """False: above that floor everything is handed over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What is to be placed."""

    num_tokens: int
    num_missing: int
    """Of them, those that the decode worker has no KV for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Where a prompt goes, and why."""

    is_here: bool
    reason: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What handing a prompt over would take."""

    seconds: float
    """Until it has landed."""
    token_s: float
    """Of them, for each token that is computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Heard:
    """What a prefill worker last said of itself."""

    queued_tokens: int
    token_s: float
    at: float

    def queue_s(self, now: float) -> float:
        """What is left of its queue if nobody added to it since."""
        return max(0.0, self.queued_tokens * self.token_s - (now - self.at))


class PrefillOutlook:
    """What one decode worker knows of its prefill pool, from the answers to what it handed over."""

    def __init__(self, *, block_size: int, stale_s: float = 60.0) -> None:
        """What a prefill worker said counts for `stale_s`."""
        self._block_size = block_size
        self._stale_s = stale_s
        self._heard: dict[str, _Heard] = {}
        self._asked_tokens = 0
        self._added = FadingLine(half_life=_HALF_LIFE_HANDOFFS)
        self._found = FadingRatio(half_life=_HALF_LIFE_PROMPT_TOKENS)

    def asked(self, num_tokens: int) -> None:
        """A prompt is on its way to the pool: it counts as queued there until `answered`."""
        self._asked_tokens += num_tokens

    def answered(self, num_tokens: int) -> None:
        """The pool took that prompt, whose tokens its load counts by now, or did not."""
        self._asked_tokens -= num_tokens

    def heard(self, worker_id: str, load: PrefillLoad, now: float) -> None:
        """A prefill worker said how it is; one that has measured nothing says nothing."""
        if load.prompt_token_s is not None:
            self._heard[worker_id] = _Heard(
                queued_tokens=load.queued_tokens, token_s=load.prompt_token_s, at=now
            )

    def lost(self, worker_id: str) -> None:
        """A hand-off from this worker failed: nothing that it said counts any more."""
        self._heard.pop(worker_id, None)

    def landed(self, prompt: Prompt, *, num_found: int, added_s: float) -> None:
        """A hand-off succeeded: prefill found so many tokens, and it took so long beside computing.

        That is, until prefill had accepted it, and from the last grant to VALID.
        """
        self._added.observe(self._num_blocks(prompt), added_s)
        self._found.observe(num_found, prompt.num_tokens)

    def forecast(self, prompt: Prompt, now: float) -> Forecast | None:
        """What handing a prompt over would take; None while nothing recent is known.

        Of several prefill workers the least busy one counts: Serve's router looks for it too.
        """
        recent = [one for one in self._heard.values() if now - one.at <= self._stale_s]
        added_s = self._added.at(self._num_blocks(prompt))
        if not recent or added_s is None:
            return None
        best = min(recent, key=lambda one: one.queue_s(now))
        computed = prompt.num_tokens * (1.0 - (self._found.value or 0.0)) + self._asked_tokens
        return Forecast(
            seconds=best.queue_s(now) + computed * best.token_s + added_s, token_s=best.token_s
        )

    def _num_blocks(self, prompt: Prompt) -> int:
        return ceil_div(prompt.num_missing, self._block_size)


class PlacementRule:
    """Where the prompts of one decode worker are computed."""

    def __init__(self, config: PlacementConfig, outlook: PrefillOutlook) -> None:
        self._config = config
        self._outlook = outlook

    def decide(self, prompt: Prompt, here: Load, now: float) -> Decision:
        """Where this prompt is computed, of a worker that could hand it over."""
        if prompt.num_missing <= self._config.local_prefill_tokens:
            return Decision(is_here=True, reason=Reason.SHORT)
        if not self._config.is_by_cost:
            return Decision(is_here=False, reason=Reason.SETTING)
        there = self._outlook.forecast(prompt, now)
        if there is None:
            return Decision(is_here=False, reason=Reason.UNMEASURED)
        is_here = _here_s(prompt, here, assumed_token_s=there.token_s) < there.seconds
        return Decision(is_here=is_here, reason=Reason.CHEAPER)


def _here_s(prompt: Prompt, here: Load, *, assumed_token_s: float) -> float:
    """What computing a prompt here costs it and the streams; a new worker is as fast as prefill."""
    token_s = assumed_token_s if here.prompt_token_s is None else here.prompt_token_s
    queued = here.queued_tokens + prompt.num_missing
    own_s = queued * (token_s + here.streams_s / here.step_tokens)
    return own_s + here.num_streams * prompt.num_missing * token_s
