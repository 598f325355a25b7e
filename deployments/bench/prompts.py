"""Where the text of a prompt comes from. Pure, and the same for the same seed, run and request.

Made text is of common words that are one token each in most vocabularies. How long a prompt came
out is never assumed: the report has the server's own count.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from deployments.bench.errors import BenchInputError
from deployments.bench.traces import BLOCK_TOKENS
from deployments.bench.workload import PlannedRequest

__all__ = ["BlockPrompts", "ListedPrompts", "PromptSource", "WordPrompts", "parse_prompts"]

_WORDS = tuple(
    """
    amber anchor apple arrow autumn bacon badge bamboo banana barrel basket beach beacon bean bear
    bell bench berry bicycle bird blanket blossom boat bone border bottle branch brass bread breeze
    brick bridge broom brush bubble bucket butter button cabin cable cactus camel camera canal
    candle canvas canyon captain carbon carpet carrot castle cave cedar chalk cherry chest chimney
    circle clay cliff clock cloud coal coast coconut coffee coin comet compass copper coral corn
    cotton crane crater cream creek cricket crown crystal curtain dawn deer desert dew diamond dish
    dolphin donkey dragon drum dust eagle echo elbow engine falcon feather fence fern ferry field
    finger flame flute fog forest fork fossil fountain fox frost fruit garden gate ginger glacier
    glass glove goat gold grape grass gravel guitar hammer harbor harp harvest hawk hazel helmet
    hill honey horn horse island ivory jacket jar jewel jungle kettle key kite knot ladder lake lamp
    lantern leaf leather lemon lens lever lily lion lizard lobster lotus magnet mango maple marble
    market meadow metal mill mirror mist monkey moon moss moth mountain mud needle nest net nut oak
    oat ocean olive onion orange orbit orchard owl oyster paint palm paper parrot path peach pearl
    pencil pepper piano pigeon pillow pine pipe planet plum pocket pond poppy porch potato pottery
    pump puzzle quartz quilt rabbit rain reef ribbon rice ridge river road rock roof root rope rose
    saddle sail salmon salt sand sea seal seed shadow sheep shell shield ship shoe shore silk silver
    sky sled smoke snail snow soap soil spark spider spoon spring squirrel star steam steel stone
    storm straw stream string sugar summer sun table tail tea temple thread thunder tide tiger
    timber tin tower trail train tree tunnel turtle valley velvet village vine violet violin wagon
    walnut water wave wax whale wheat wheel willow wind window wing winter wolf wood wool yarn zebra
    """.split()  # noqa: SIM905  # three hundred quoted words would be harder to read
)


class PromptSource(Protocol):
    """Gives each planned request its text."""

    def prompt(self, request: PlannedRequest, run: str) -> str:
        """The text; `run` names one sending of a load, so that the next finds no cached prompt."""


class WordPrompts:
    """Words by chance; only the first `shared_prefix_tokens` are the same in all prompts.

    The shared part is the same in every run too: a server's prefix cache may know it.
    """

    def __init__(self, seed: str, *, shared_prefix_tokens: int = 0) -> None:
        self._seed = seed
        self._shared = _words(f"{seed}/shared", shared_prefix_tokens)

    def prompt(self, request: PlannedRequest, run: str) -> str:
        """See `PromptSource`; at least one word is the request's own."""
        own_tokens = max(1, request.prompt_tokens - len(self._shared))
        own = _words(f"{self._seed}/{run}/{request.index}", own_tokens)
        return " ".join([*self._shared, *own])


class BlockPrompts:
    """Prompts that share what a trace's requests shared: equal block ids give equal words."""

    def __init__(self, seed: str) -> None:
        self._seed = seed

    def prompt(self, request: PlannedRequest, run: str) -> str:
        """See `PromptSource`; what the blocks do not cover is the request's own."""
        base = f"{self._seed}/{run}"
        words: list[str] = []
        for block_id in request.block_ids:
            if len(words) >= request.prompt_tokens:
                break
            words += _words(f"{base}/block {block_id}", BLOCK_TOKENS)
        words += _words(f"{base}/{request.index}", request.prompt_tokens - len(words))
        return " ".join(words[: request.prompt_tokens])


class ListedPrompts:
    """Given prompts in their order, from the first again after the last; lengths are their own."""

    def __init__(self, prompts: Sequence[str]) -> None:
        if not prompts:
            raise BenchInputError("There is no prompt to send.")
        self._prompts = tuple(prompts)

    def prompt(self, request: PlannedRequest, run: str) -> str:
        """See `PromptSource`; every run sends the same ones."""
        return self._prompts[request.index % len(self._prompts)]


def parse_prompts(name: str, lines: Iterable[str]) -> list[str]:
    """Prompts of a file, one a line: JSON objects where the first line is one, else plain text.

    An object has its text in `prompt`, or the first of its `turns` (as MT-Bench has them).
    """
    content = [line.strip() for line in lines if line.strip()]
    if not content or not content[0].startswith("{"):
        return content
    return [_prompt_of(name, number, line) for number, line in enumerate(content, start=1)]


def _prompt_of(name: str, number: int, line: str) -> str:
    try:
        entry: dict[str, Any] = json.loads(line)
        text = entry["prompt"] if "prompt" in entry else entry["turns"][0]
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise BenchInputError(
            f"Line {number} of {name} is no JSON object with a prompt or turns ({error!r})."
        ) from error
    if not isinstance(text, str) or not text:
        raise BenchInputError(f"Line {number} of {name} has a prompt that is no text.")
    return text


def _words(seed: str, num_words: int) -> list[str]:
    # Not for secrets: the point is that a seed gives the same prompts again.
    return random.Random(seed).choices(_WORDS, k=max(0, num_words))
