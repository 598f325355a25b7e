"""One sequence's worker events to deltas of text: the one path for streams and whole answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from deployments.openai.answer import Delta, Ending, TokenEntry
from deployments.openai.errors import GenerationFailedError
from deployments.text.detokenizer import Detokenizer
from deployments.text.stops import StopFilter
from deployments.text.token_entries import TokenAligner, prompt_entries
from kv_transfer.logprobs import TokenLogprobs
from workers.messages import (
    Failed,
    Finished,
    FinishReason,
    GenerateEvent,
    PromptFrame,
    TokenFrame,
)

__all__ = ["SequenceText", "TextOptions"]

_FINISH_REASONS: dict[FinishReason, Literal["stop", "length"]] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """What a choice shows, and how."""

    decode: Callable[[Sequence[int]], str]
    """The text of token ids."""
    token_bytes: Callable[[int], bytes]
    """A token's own text in UTF-8; part of a character for some."""
    stops: tuple[str, ...] = ()
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    """The client's own: one that ends the text is named as the reason."""
    num_logprobs: int | None = None
    """Alternatives shown of each token of the text; None shows no tokens."""
    num_prompt_logprobs: int | None = None
    """The same of each token of the prompt, shown apart from the text."""
    prompt_token_ids: tuple[int, ...] = ()
    prompt_text: str = ""
    """Needed where the prompt, or places in the text, are shown."""
    is_echoed: bool = False
    """Whether the text begins with the prompt's."""
    has_output: bool = True
    """Whether there is anything but the prompt in the text."""


class SequenceText:
    """Turns the events of one sequence into the deltas of one choice.

    Tokens are taken one by one, so neither the text, nor the token that a stop string ends on, nor
    the count depends on how the worker frames them. Stop strings count from the token on that
    completes `min_tokens`, and never in an echoed prompt.
    """

    def __init__(self, index: int, options: TextOptions) -> None:
        self._index = index
        self._options = options
        self._detokenizer = Detokenizer(options.decode)
        self._stops = StopFilter(options.stops)
        self._aligner: TokenAligner | None = None
        if options.num_logprobs is not None:
            self._aligner = TokenAligner(
                offset=len(options.prompt_text),
                num_top=options.num_logprobs,
                token_bytes=options.token_bytes,
            )
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._is_begun = False
        self.completion_tokens = 0
        self.cached_tokens: int | None = None
        """Prompt tokens that nobody computed; known from the first tokens on."""
        self.has_ended = False

    def accept(self, event: GenerateEvent) -> Delta | None:
        """What an event means for the client, if anything yet.

        Raises `GenerationFailedError` for a failure.
        """
        if isinstance(event, Failed):
            raise GenerationFailedError.from_event(event)
        if isinstance(event, PromptFrame):
            self._prompt_logprobs += event.logprobs
            return None
        self.cached_tokens = event.cached_tokens
        delta = self._finish(event) if isinstance(event, Finished) else self._tokens(event)
        if self._is_begun:
            return delta
        self._is_begun = True
        return self._with_prompt(delta)

    def _with_prompt(self, delta: Delta) -> Delta:
        """The first delta: the prompt goes before the text, its tokens before those of the text."""
        options = self._options
        if options.num_prompt_logprobs is not None:
            delta = replace(delta, prompt=self._prompt_entries(options.num_prompt_logprobs))
        if not options.is_echoed:
            return delta
        if options.num_logprobs is not None:
            entries = self._prompt_entries(options.num_logprobs)
            delta = replace(delta, tokens=(*entries, *delta.tokens))
        return replace(delta, text=options.prompt_text + delta.text)

    def _prompt_entries(self, num_top: int) -> tuple[TokenEntry, ...]:
        return prompt_entries(
            self._options.prompt_token_ids,
            self._prompt_logprobs,
            text=self._options.prompt_text,
            num_top=num_top,
            token_bytes=self._options.token_bytes,
        )

    def _tokens(self, frame: TokenFrame) -> Delta:
        if not self._options.has_output:
            return self._end("", "length")
        texts = []
        for place, token_id in enumerate(frame.token_ids):
            self.completion_tokens += 1
            may_stop = self.completion_tokens >= self._options.min_tokens
            piece = self._detokenizer.push(token_id)
            if self._aligner is not None:
                self._aligner.add(token_id, frame.logprobs[place], piece)
            texts.append(self._stops.push(piece, may_stop=may_stop))
            if self._stops.matched is not None:
                return self._end("".join(texts), "stop")
        return self._delta("".join(texts), None)

    def _finish(self, event: Finished) -> Delta:
        if not self._options.has_output:
            return self._end("", "length")
        self.completion_tokens = event.completion_tokens
        piece = self._detokenizer.flush()
        if self._aligner is not None:
            self._aligner.complete(piece)
        text = self._stops.push(piece)
        if self._stops.matched is not None:
            return self._end(text, "stop")
        text += self._stops.flush()
        delta = self._end(text, _FINISH_REASONS[event.reason], event.stop_token_id)
        if self._aligner is None:
            return delta
        return replace(delta, tokens=(*delta.tokens, *self._aligner.rest()))

    def _end(
        self,
        text: str,
        finish_reason: Literal["stop", "length"],
        stop_token_id: int | None = None,
    ) -> Delta:
        self.has_ended = True
        stop_reason: str | int | None = self._stops.matched
        if stop_token_id in self._options.stop_token_ids:
            stop_reason = stop_token_id
        return self._delta(text, Ending(finish_reason=finish_reason, stop_reason=stop_reason))

    def _delta(self, text: str, ending: Ending | None) -> Delta:
        return Delta(
            index=self._index,
            text=text,
            completion_tokens=self.completion_tokens,
            ending=ending,
            tokens=() if self._aligner is None else self._aligner.take(text),
        )
