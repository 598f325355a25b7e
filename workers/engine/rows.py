"""A sequence's share of a step: which of its tokens go in, and what is to come out."""

from __future__ import annotations

from workers.engine.sequence import Sequence
from workers.engine.step import PromptScoring, ScheduledSequence
from workers.engine.token_counts import SeenTokens

__all__ = ["decode_row", "prompt_chunk"]


def decode_row(sequence: Sequence) -> ScheduledSequence:
    """The last token goes in, the next one comes out."""
    return ScheduledSequence(
        sequence_id=sequence.spec.sequence_id,
        token_ids=(sequence.token_ids[-1],),
        start=sequence.num_computed,
        block_tables=sequence.block_tables,
        sampling=sequence.spec.sampling,
        num_output_tokens=sequence.num_output_tokens,
        seen=_seen(sequence),
    )


def prompt_chunk(sequence: Sequence, max_tokens: int) -> ScheduledSequence:
    """The next tokens of a prompt; the chunk that ends it samples."""
    start = sequence.num_computed
    end = min(start + max_tokens, sequence.num_prompt_tokens)
    is_last = end == sequence.num_prompt_tokens
    return ScheduledSequence(
        sequence_id=sequence.spec.sequence_id,
        token_ids=tuple(sequence.token_ids[start:end]),
        start=start,
        block_tables=sequence.block_tables,
        sampling=sequence.spec.sampling if is_last else None,
        seen=_seen(sequence) if is_last else None,
        scoring=_scoring(sequence, start, end),
        num_output_tokens=sequence.num_output_tokens,
    )


def _seen(sequence: Sequence) -> SeenTokens | None:
    return None if sequence.token_counts is None else sequence.token_counts.seen()


def _scoring(sequence: Sequence, start: int, end: int) -> PromptScoring | None:
    """What the rows of prompt tokens start to end are compared with: each with the token after."""
    num_top = sequence.spec.sampling.prompt_logprobs
    if num_top is None:
        return None
    following = tuple(sequence.token_ids[start + 1 : end + 1])
    return PromptScoring(token_ids=following, num_top=num_top)
