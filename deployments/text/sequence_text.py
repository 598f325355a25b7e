"""One sequence's worker events to deltas of text: the one path for streams and whole answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from deployments.openai.answer import Delta, Ending
from deployments.openai.errors import GenerationFailedError
from deployments.text.detokenizer import Detokenizer
from deployments.text.stops import StopFilter
from workers.messages import Failed, Finished, FinishReason, GenerateEvent, PromptFrame

__all__ = ["SequenceText"]

_FINISH_REASONS: dict[FinishReason, Literal["stop", "length"]] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
}


class SequenceText:
    """Turns the events of one sequence into the deltas of one choice.

    Tokens are taken one by one, so neither the text, nor the token that a stop string ends on, nor
    the count depends on how the worker frames them. Stop strings count from the token on that
    completes `min_tokens`.
    """

    def __init__(
        self,
        *,
        index: int,
        decode: Callable[[Sequence[int]], str],
        stops: Sequence[str],
        min_tokens: int,
    ) -> None:
        self._index = index
        self._detokenizer = Detokenizer(decode)
        self._stops = StopFilter(stops)
        self._min_tokens = min_tokens
        self.completion_tokens = 0
        self.cached_tokens: int | None = None
        """Prompt tokens that nobody computed; known from the first tokens on."""
        self.has_ended = False

    def accept(self, event: GenerateEvent) -> Delta:
        """What an event means for the client; raises `GenerationFailedError` for a failure."""
        if isinstance(event, Failed):
            raise GenerationFailedError.from_event(event)
        if isinstance(event, Finished):
            return self._finish(event)
        if isinstance(event, PromptFrame):
            return self._delta("", None)
        self.cached_tokens = event.cached_tokens
        return self._tokens(event.token_ids)

    def _tokens(self, token_ids: Sequence[int]) -> Delta:
        texts = []
        for token_id in token_ids:
            self.completion_tokens += 1
            may_stop = self.completion_tokens >= self._min_tokens
            texts.append(self._stops.push(self._detokenizer.push(token_id), may_stop=may_stop))
            if self._stops.matched is not None:
                return self._end("".join(texts), "stop")
        return self._delta("".join(texts), None)

    def _finish(self, event: Finished) -> Delta:
        self.completion_tokens = event.completion_tokens
        self.cached_tokens = event.cached_tokens
        text = self._stops.push(self._detokenizer.flush())
        if self._stops.matched is not None:
            return self._end(text, "stop")
        return self._end(text + self._stops.flush(), _FINISH_REASONS[event.reason])

    def _end(self, text: str, finish_reason: Literal["stop", "length"]) -> Delta:
        self.has_ended = True
        ending = Ending(finish_reason=finish_reason, stop_reason=self._stops.matched)
        return self._delta(text, ending)

    def _delta(self, text: str, ending: Ending | None) -> Delta:
        return Delta(
            index=self._index,
            text=text,
            completion_tokens=self.completion_tokens,
            ending=ending,
        )
