"""Traces of real services: their lines in, arrivals and lengths out. Pure."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from deployments.bench.errors import BenchInputError

__all__ = ["BLOCK_TOKENS", "TraceRow", "parse_trace"]

BLOCK_TOKENS = 512
"""Prompt tokens that one block id of a Mooncake trace stands for."""

_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRow:
    """One request of a trace."""

    at_s: float
    """When it arrived, in seconds from any fixed moment."""
    prompt_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...] = ()
    """Equal ids are equal blocks of BLOCK_TOKENS prompt tokens; empty where the trace has none."""


def parse_trace(name: str, lines: Iterable[str]) -> tuple[TraceRow, ...]:
    """Rows in order of arrival, of an Azure CSV or a Mooncake JSONL, whichever the lines are.

    A length of 0 counts as 1: no server answers with nothing. BenchInputError names the first line
    that is neither.
    """
    content = [line for line in lines if line.strip()]
    is_azure = bool(content) and content[0].startswith(_AZURE_COLUMNS[0])
    parse = _parse_azure if is_azure else _parse_mooncake
    return tuple(sorted(parse(name, content), key=lambda row: row.at_s))


def _parse_azure(name: str, lines: Sequence[str]) -> list[TraceRow]:
    rows: list[TraceRow] = []
    start: datetime | None = None
    for number, entry in enumerate(csv.DictReader(lines), start=2):
        try:
            moment, prompt, output = (entry[column] for column in _AZURE_COLUMNS)
            arrived = datetime.fromisoformat(moment)
            start = start or arrived
            rows.append(
                TraceRow(
                    at_s=(arrived - start).total_seconds(),
                    prompt_tokens=max(1, int(prompt)),
                    output_tokens=max(1, int(output)),
                )
            )
        except (KeyError, TypeError, ValueError) as error:
            raise _broken(name, number, error) from error
    return rows


def _parse_mooncake(name: str, lines: Sequence[str]) -> list[TraceRow]:
    rows: list[TraceRow] = []
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
            rows.append(
                TraceRow(
                    at_s=entry["timestamp"] / 1000,
                    prompt_tokens=max(1, int(entry["input_length"])),
                    output_tokens=max(1, int(entry["output_length"])),
                    block_ids=tuple(int(block) for block in entry.get("hash_ids", ())),
                )
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise _broken(name, number, error) from error
    return rows


def _broken(name: str, number: int, error: Exception) -> BenchInputError:
    return BenchInputError(
        f"Line {number} of {name} is no request of an Azure or Mooncake trace "
        f"({type(error).__name__}: {error})."
    )
