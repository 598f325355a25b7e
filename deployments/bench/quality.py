"""How well the engine predicts a text in a dtype, and how far it is from itself in fp32.

Runs the engine's own runner in this process, in chunks over a paged cache, as a server would. A
text is cut into windows, each a sequence of its own; a window's first token has no context and is
not scored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress

from configs.schema import ModelSettings
from deployments.bench.errors import BenchInputError, NothingMeasuredError
from deployments.bench.measure import quantile
from kv_transfer.geometry import BlockId, KVLayout
from workers.engine.attention.backend import build_metadata
from workers.engine.block_table import BlockTable
from workers.engine.build import build_runner
from workers.engine.model_runner import RaggedModelRunner
from workers.engine.step import ScheduledSequence, SequenceId, StepPlan
from workers.host import available_cores
from workers.models.facts import facts_from_info
from workers.models.loading import ModelInfo, load_model_info, load_tokenizer
from workers.models.store import ModelStore, default_cache_dir
from workers.planning import kv_layout

__all__ = [
    "Quality",
    "QualityOptions",
    "Scorer",
    "measure_file",
    "measure_quality",
    "quality_as_text",
]

_BLOCK_SIZE = 16
_DTYPES = ("bf16", "fp32")


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityOptions:
    """What is judged, on how much of the text."""

    dtype: str
    max_tokens: int
    window_tokens: int
    """Tokens of one sequence."""
    chunk_tokens: int
    """Tokens of one step."""
    threads: int | None = None

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise BenchInputError(
                f"The dtype is one of {', '.join(_DTYPES)}, but this is {self.dtype!r}."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """The judged dtype beside fp32; divergences in nats per token."""

    model: str
    dtype: str
    num_scored: int
    """Tokens that were predicted."""
    perplexity: float
    reference_perplexity: float
    kl_mean: float
    """Of the judged distribution from that of fp32."""
    kl_p99: float
    kl_max: float
    same_top_share: float
    """Positions where both have the same likeliest token."""

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return asdict(self)


class Scorer:
    """Logits of a sequence by the engine's runner, chunk by chunk."""

    def __init__(self, runner: RaggedModelRunner, layout: KVLayout) -> None:
        self._runner = runner
        self._layout = layout

    def logits(self, token_ids: Sequence[int], start: int, end: int) -> torch.Tensor:
        """`[end - start, vocabulary]` in fp32; the tokens before start were computed just before.

        A sequence of its own begins at start 0, and takes the blocks of the one before it.
        """
        sequence = ScheduledSequence(
            sequence_id=SequenceId(0),
            token_ids=tuple(token_ids[start:end]),
            start=start,
            block_tables=self._tables(self._layout.blocks_for(end)),
            sampling=None,
        )
        plan = StepPlan(step_id=0, sequences=(sequence,))
        rows = np.arange(end - start, dtype=np.int64)
        return self._runner.logits(build_metadata(plan, self._layout.block_size), rows).float()

    def _tables(self, num_blocks: int) -> tuple[BlockTable, ...]:
        """Every token's KV in every group: what a sliding window hides costs little here."""
        num_groups = len(self._layout.groups)
        return tuple(
            BlockTable(
                block_ids=tuple(BlockId(block * num_groups + group) for block in range(num_blocks))
            )
            for group in range(num_groups)
        )


def measure_file(
    text_file: Path,
    model: str,
    options: QualityOptions,
    *,
    environ: Mapping[str, str],
    console: Console,
) -> Quality:
    """Judge a model's dtype on a text file; raises BenchError, ModelError or WorkerError."""
    try:
        text = text_file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BenchInputError(f"{text_file} cannot be read: {error}.") from error
    path = ModelStore(default_cache_dir(environ)).resolve(model).path
    info = load_model_info(path)
    if options.window_tokens > info.context_length:
        raise BenchInputError(
            f"A window of {options.window_tokens} tokens does not fit the model's "
            f"{info.context_length}."
        )
    token_ids = load_tokenizer(path)(text, add_special_tokens=False).input_ids
    reference = _load_scorer(path, info, "fp32", options)
    is_reference = options.dtype == "fp32"
    judged = reference if is_reference else _load_scorer(path, info, options.dtype, options)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("tokens", total=min(len(token_ids), options.max_tokens))
        return measure_quality(
            token_ids,
            judged,
            reference,
            model=model,
            options=options,
            on_tokens=lambda count: progress.advance(task, count),
        )


def measure_quality(
    token_ids: Sequence[int],
    judged: Scorer,
    reference: Scorer,
    *,
    model: str,
    options: QualityOptions,
    on_tokens: Callable[[int], None],
) -> Quality:
    """Score the first tokens of a text with both; `on_tokens` hears how many were computed."""
    scores = _Scores()
    for window in _windows(token_ids[: options.max_tokens], options.window_tokens):
        for start in range(0, len(window), options.chunk_tokens):
            end = min(start + options.chunk_tokens, len(window))
            next_ids = torch.tensor(window[start + 1 : end + 1])
            num_scored = len(next_ids)  # a window's last token has no next one
            ours = judged.logits(window, start, end)[:num_scored]
            theirs = (
                ours if judged is reference else reference.logits(window, start, end)[:num_scored]
            )
            if num_scored:
                scores.add(ours, theirs, next_ids)
            on_tokens(end - start)
    return scores.summary(model=model, dtype=options.dtype)


def quality_as_text(quality: Quality) -> str:
    """The figures in three lines."""
    ratio = quality.perplexity / quality.reference_perplexity
    return "\n".join(
        [
            f"{quality.model} in {quality.dtype}, {quality.num_scored} tokens predicted",
            f"  perplexity {quality.perplexity:.4f}; in fp32 {quality.reference_perplexity:.4f}, "
            f"ratio {ratio:.5f}",
            f"  KL divergence from fp32: mean {quality.kl_mean:.2e}, p99 {quality.kl_p99:.2e}, "
            f"max {quality.kl_max:.2e} nats; same likeliest token {quality.same_top_share:.2%}",
        ]
    )


class _Scores:
    """Per scored token what both models made of it."""

    def __init__(self) -> None:
        self._losses: list[float] = []
        self._reference_losses: list[float] = []
        self._divergences: list[float] = []
        self._num_same = 0

    def add(self, ours: torch.Tensor, theirs: torch.Tensor, next_ids: torch.Tensor) -> None:
        """Take rows of logits `[n, vocabulary]` and the tokens that came next, `[n]`."""
        q, p = torch.log_softmax(ours, dim=-1), torch.log_softmax(theirs, dim=-1)
        rows = torch.arange(len(next_ids))
        self._losses += (-q[rows, next_ids]).tolist()
        self._reference_losses += (-p[rows, next_ids]).tolist()
        # A divergence is at least 0; rounding may put it a little below.
        self._divergences += (p.exp() * (p - q)).sum(dim=-1).clamp_min(0).tolist()
        self._num_same += int((q.argmax(dim=-1) == p.argmax(dim=-1)).sum())

    def summary(self, *, model: str, dtype: str) -> Quality:
        """The figures; NothingMeasuredError where there are none or they are no numbers."""
        count = len(self._losses)
        if not count:
            raise NothingMeasuredError("The text has fewer than two tokens: nothing is predicted.")
        if not all(map(math.isfinite, (*self._losses, *self._reference_losses))):
            raise NothingMeasuredError(f"{model} gives logits that are not finite.")
        divergences = sorted(self._divergences)
        return Quality(
            model=model,
            dtype=dtype,
            num_scored=count,
            perplexity=math.exp(math.fsum(self._losses) / count),
            reference_perplexity=math.exp(math.fsum(self._reference_losses) / count),
            kl_mean=math.fsum(divergences) / count,
            kl_p99=quantile(divergences, 0.99),
            kl_max=divergences[-1],
            same_top_share=self._num_same / count,
        )


def _windows(token_ids: Sequence[int], window_tokens: int) -> Iterator[Sequence[int]]:
    for start in range(0, len(token_ids), window_tokens):
        yield token_ids[start : start + window_tokens]


def _load_scorer(path: Path, info: ModelInfo, dtype: str, options: QualityOptions) -> Scorer:
    """The engine's runner in a dtype, over a pool of one window."""
    settings = ModelSettings.model_validate({"dtype": dtype})
    facts = facts_from_info(info, settings, is_faster_in_bf16=False)
    layout = kv_layout(facts, block_size=_BLOCK_SIZE, max_model_len=options.window_tokens)
    runner, _ = build_runner(
        path,
        info=info,
        layout=layout,
        num_blocks=layout.blocks_for(options.window_tokens) * len(layout.groups),
        threads=options.threads or available_cores(),
        max_model_len=options.window_tokens,
    )
    return Scorer(runner, layout)
