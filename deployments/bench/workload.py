"""Which requests a load consists of, and when each is due. Pure: chance comes in as a generator.

A planned request has lengths, not text: the prompt source makes the text when it is sent, so that
a long trace costs no memory.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from deployments.bench.errors import BenchInputError
from deployments.bench.traces import TraceRow

__all__ = ["Lengths", "Load", "PlannedRequest", "closed_load", "poisson_load", "trace_load"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Of every request of a load, in tokens."""

    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRequest:
    """One request before it is sent."""

    index: int
    """Its place in the load."""
    prompt_tokens: int
    output_tokens: int
    due_s: float = 0.0
    """When it is sent, in seconds from the load's start; closed loops send when a place is free."""
    block_ids: tuple[int, ...] = ()
    """Where a trace has them: equal ids are equal parts of the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Requests that are sent together, and what is measured as one."""

    label: str
    requests: tuple[PlannedRequest, ...]
    concurrency: int | None
    """Requests in flight at most; None is an open loop, which sends each when it is due."""
    num_cut: int = 0
    """Requests whose lengths were cut to a limit."""


def closed_load(concurrency: int, *, num_requests: int, lengths: Lengths) -> Load:
    """As many requests in flight all the time, until all are done.

    There are at least as many requests as places.
    """
    return Load(
        label=f"concurrency {concurrency}",
        requests=tuple(_planned(index, lengths) for index in range(max(num_requests, concurrency))),
        concurrency=concurrency,
    )


def poisson_load(rate: float, *, num_requests: int, lengths: Lengths, rng: random.Random) -> Load:
    """Arrivals that know nothing of each other, `rate` a second on average, the first at once."""
    if not rate > 0:
        raise BenchInputError(f"A rate is above 0 requests a second, but this is {rate:g}.")
    due_s, requests = 0.0, []
    for index in range(num_requests):
        requests.append(_planned(index, lengths, due_s))
        due_s += rng.expovariate(rate)
    return Load(label=f"rate {rate:g}/s", requests=tuple(requests), concurrency=None)


def trace_load(
    rows: Sequence[TraceRow],
    *,
    name: str,
    num_requests: int,
    time_scale: float = 1.0,
    max_prompt_tokens: int | None = None,
    max_output_tokens: int | None = None,
) -> Load:
    """The trace's first requests, at its times multiplied by time_scale.

    Lengths above a limit are cut to it, and the load says how many requests that met: leaving them
    out would change the arrivals.
    """
    chosen = rows[:num_requests]
    if not chosen:
        raise BenchInputError(f"The trace {name} holds no request.")
    if not time_scale > 0:
        raise BenchInputError(f"A time scale is above 0, but this is {time_scale:g}.")
    requests = tuple(
        PlannedRequest(
            index=index,
            due_s=(row.at_s - chosen[0].at_s) * time_scale,
            prompt_tokens=_at_most(row.prompt_tokens, max_prompt_tokens),
            output_tokens=_at_most(row.output_tokens, max_output_tokens),
            block_ids=row.block_ids,
        )
        for index, row in enumerate(chosen)
    )
    num_cut = sum(
        (planned.prompt_tokens, planned.output_tokens) != (row.prompt_tokens, row.output_tokens)
        for planned, row in zip(requests, chosen, strict=True)
    )
    return Load(label=f"trace {name}", requests=requests, concurrency=None, num_cut=num_cut)


def _planned(index: int, lengths: Lengths, due_s: float = 0.0) -> PlannedRequest:
    return PlannedRequest(
        index=index,
        due_s=due_s,
        prompt_tokens=lengths.prompt_tokens,
        output_tokens=lengths.output_tokens,
    )


def _at_most(value: int, limit: int | None) -> int:
    return value if limit is None else min(value, limit)
