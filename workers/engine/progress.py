"""What a computed chunk or a sampled token means for its sequence, and which events say so.

The scheduler alone calls this, with sequences that live.
"""

from __future__ import annotations

from kv_transfer.logprobs import TokenLogprobs
from workers.engine.events import (
    ChunkComputed,
    FinishReason,
    PromptComputed,
    PromptScored,
    SequenceFailed,
    SequenceFinished,
    TokensSampled,
)
from workers.engine.roster import Roster
from workers.engine.sequence import Sequence, SequenceMode, SequenceStatus
from workers.engine.step import ScheduledSequence, StepResult
from workers.errors import WorkerError

__all__ = ["Progress"]


class Progress:
    """Moves sequences on, up to their end, and counts their tokens."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self.num_prompt_tokens = 0
        """Prompt tokens computed here."""
        self.num_output_tokens = 0
        """Sampled here or published."""

    def chunk_computed(
        self, sequence: Sequence, entry: ScheduledSequence, result: StepResult
    ) -> None:
        """A prompt chunk is computed; after the last one the first token is there too."""
        self.num_prompt_tokens += len(entry.token_ids)
        number = entry.sequence_id
        prompt_logprobs = result.prompt_logprobs.get(number, ())
        if sequence.spec.mode is SequenceMode.PREFILL_ONLY:
            computed = ChunkComputed(
                sequence_id=number,
                num_computed=entry.end,
                block_tables=sequence.block_tables,
                prompt_logprobs=prompt_logprobs,
            )
            self._roster.emit(computed)
        elif prompt_logprobs:
            self._roster.emit(PromptScored(sequence_id=number, logprobs=prompt_logprobs))
        if entry.sampling is not None:
            self._prompt_computed(sequence, result.token_ids[number], result.logprobs.get(number))

    def token_sampled(
        self, sequence: Sequence, token_id: int, logprobs: TokenLogprobs | None
    ) -> None:
        """One more output token: pass it on, and see whether it was the last."""
        sequence.append(token_id)
        self.num_output_tokens += 1
        spec = sequence.spec
        if token_id in spec.sampling.stop_token_ids:
            self._finish(sequence, FinishReason.STOP, stop_token_id=token_id)
            return
        sampled = TokensSampled(
            sequence_id=spec.sequence_id,
            token_ids=(token_id,),
            num_hit_tokens=sequence.num_hit_tokens,
            logprobs=() if logprobs is None else (logprobs,),
        )
        self._roster.emit(sampled)
        if sequence.num_output_tokens >= spec.sampling.max_tokens:
            self._finish(sequence, FinishReason.LENGTH)

    def fail(self, sequence: Sequence, error: WorkerError) -> None:
        """The sequence ends with an error."""
        failed = SequenceFailed(sequence_id=sequence.sequence_id, error=error)
        self._roster.end(sequence, SequenceStatus.FAILED, failed)

    def _prompt_computed(
        self, sequence: Sequence, token_id: int, logprobs: TokenLogprobs | None
    ) -> None:
        """The whole prompt has KV: keep it for its reader, or go on from its first token."""
        if sequence.spec.mode is not SequenceMode.PREFILL_ONLY:
            self._roster.start_decoding(sequence)
            self.token_sampled(sequence, token_id, logprobs)
            return
        self.num_output_tokens += 1
        self._roster.hold(sequence)
        self._roster.emit(
            PromptComputed(
                sequence_id=sequence.sequence_id,
                first_token=token_id,
                logprobs=logprobs,
                num_hit_tokens=sequence.num_hit_tokens,
            )
        )

    def _finish(
        self, sequence: Sequence, reason: FinishReason, *, stop_token_id: int | None = None
    ) -> None:
        finished = SequenceFinished(
            sequence_id=sequence.sequence_id,
            reason=reason,
            prompt_tokens=sequence.num_prompt_tokens - sequence.spec.num_resumed,
            completion_tokens=sequence.num_output_tokens,
            num_hit_tokens=sequence.num_hit_tokens,
            stop_token_id=stop_token_id,
        )
        self._roster.end(sequence, SequenceStatus.FINISHED, finished)
