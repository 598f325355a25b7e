"""The prompts: questions that people asked, and documents that a seeded script writes."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

__all__ = ["document", "document_lengths", "questions", "random_prompts"]

_PLACES = ("harbour", "valley", "northern mill", "old town", "river crossing", "market hall")
_PEOPLE = ("The engineer", "A teacher", "The council", "Her brother", "Nobody", "The night watch")
_VERBS = ("repaired", "measured", "forgot", "painted", "described", "counted", "sold")
_THINGS = ("bridge", "ledger", "set of windows", "clock", "garden wall", "map of the coast")
_ENDINGS = (
    "before the first snow",
    "in {number} days",
    "for {number} crowns",
    "without being asked",
    "because the letter of {number} had said so",
)
_SENTENCES_PER_PARAGRAPH = 6


def document(seed: int, num_tokens: int, tokenize: Callable[[str], Sequence[int]]) -> list[int]:
    """The first num_tokens tokens of a report on everyday things; another one for each seed."""
    rng = random.Random(seed)
    text = f"Report {rng.randrange(10_000)} from the {rng.choice(_PLACES)}\n\n"
    sentences = 0
    while len(tokens := tokenize(text)) < num_tokens:
        # Tokenized again only after a while: a sentence is some fifteen tokens.
        for _ in range(max(1, (num_tokens - len(tokens)) // 15)):
            sentences += 1
            text += _sentence(rng)
            text += " " if sentences % _SENTENCES_PER_PARAGRAPH else "\n\n"
    return list(tokens[:num_tokens])


def _sentence(rng: random.Random) -> str:
    ending = rng.choice(_ENDINGS).format(number=rng.randrange(2, 2000))
    person, verb, thing = rng.choice(_PEOPLE), rng.choice(_VERBS), rng.choice(_THINGS)
    return f"{person} {verb} the {thing} of the {rng.choice(_PLACES)} {ending}."


def document_lengths(count: int, *, shortest: int = 10, longest: int = 1800) -> tuple[int, ...]:
    """Lengths in equal ratios from shortest to longest, both included; shortest first."""
    ratio = (longest / shortest) ** (1 / (count - 1))
    return tuple(round(shortest * ratio**index) for index in range(count))


def questions(data: Path) -> list[str]:
    """The first turns of MT-Bench."""
    lines = (data / "prompts" / "mt_bench_questions.jsonl").read_text().splitlines()
    return [json.loads(line)["turns"][0] for line in lines]


def random_prompts(seed: int, lengths: Sequence[int], vocabulary: int) -> list[list[int]]:
    """Token ids that mean nothing, for models that were never trained."""
    rng = random.Random(seed)
    return [[rng.randrange(1, vocabulary) for _ in range(length)] for length in lengths]
