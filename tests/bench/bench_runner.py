"""Our model runner beside transformers' own decoding, in one process, on the same weights.

    python -m tests.bench.bench_runner [--threads 1 2] [--dtypes fp32 bf16] [--only decode]

Per case the two sides take turns, step by step, so that a busy neighbour hits both. Printed are the
medians in ms of wall time with the quartiles, how many pairs, and the median of the pairs' ratios
transformers / Baton, by wall time and by processor time: above 1 Baton is faster. Both sides read
the same weights. In the cases `decode` and `prefill` transformers runs its modules with `sdpa` and
a `DynamicCache` and takes the argmax of the last rows, without the rest of `generate`'s overhead;
in the cases `generate` it is called as a user would, for 32 tokens.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from kv_transfer.geometry import BlockId, KVLayout
from workers.engine.block_table import BlockTable
from workers.engine.build import build_runner
from workers.engine.model_runner import RaggedModelRunner
from workers.engine.sampling_params import SamplingParams
from workers.engine.step import ScheduledSequence, SequenceId, StepPlan
from workers.models.loading import load_model_info

_GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
_BLOCK_SIZE = 16
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class BatonSide:
    """Sequences of equal length over scattered blocks, run by the ragged runner."""

    def __init__(self, runner: RaggedModelRunner, prompts: torch.Tensor, capacity: int) -> None:
        self._runner = runner
        self._tokens = prompts.tolist()
        self._computed = 0
        blocks = -(-capacity // _BLOCK_SIZE)
        shuffled = torch.randperm(blocks * len(prompts), generator=torch.manual_seed(0)).tolist()
        self._tables = [
            (BlockTable(block_ids=tuple(map(BlockId, shuffled[i * blocks : (i + 1) * blocks]))),)
            for i in range(len(prompts))
        ]

    def step(self) -> None:
        """Compute everything that is not computed yet and append one greedy token each."""
        plan = StepPlan(
            step_id=0,
            sequences=tuple(
                ScheduledSequence(
                    sequence_id=SequenceId(i),
                    token_ids=tuple(tokens[self._computed :]),
                    start=self._computed,
                    block_tables=table,
                    sampling=_GREEDY,
                )
                for i, (tokens, table) in enumerate(zip(self._tokens, self._tables, strict=True))
            ),
        )
        result = self._runner.execute(plan)
        self._computed = len(self._tokens[0])
        for i, tokens in enumerate(self._tokens):
            tokens.append(result.token_ids[SequenceId(i)])

    def steps(self, count: int) -> None:
        """Append `count` tokens to each sequence."""
        for _ in range(count):
            self.step()

    def prefill_chunks(self, chunk: int) -> None:
        """Compute the first sequence from its start in chunks."""
        tokens = self._tokens[0]
        for start in range(0, len(tokens), chunk):
            end = min(start + chunk, len(tokens))
            self._runner.execute(
                StepPlan(
                    step_id=0,
                    sequences=(
                        ScheduledSequence(
                            sequence_id=SequenceId(0),
                            token_ids=tuple(tokens[start:end]),
                            start=start,
                            block_tables=self._tables[0],
                            sampling=_GREEDY if end == len(tokens) else None,
                        ),
                    ),
                )
            )


class StockSide:
    """The same sequences as a rectangular batch in transformers."""

    def __init__(self, model: torch.nn.Module, prompts: torch.Tensor) -> None:
        self._model = model
        self._cache = DynamicCache(config=model.config)
        self._next = prompts

    @torch.inference_mode()
    def step(self) -> None:
        """As `BatonSide.step`."""
        output = self._model(
            input_ids=self._next, cache=self._cache, use_cache=True, logits_to_keep=1
        )
        self._next = output.logits[:, -1].argmax(dim=-1, keepdim=True)

    @torch.inference_mode()
    def prefill_chunks(self, chunk: int) -> None:
        """As `BatonSide.prefill_chunks`."""
        for part in self._next.split(chunk, dim=1):
            self._model(input_ids=part, cache=self._cache, use_cache=True, logits_to_keep=1)


@dataclass(frozen=True, slots=True)
class Taken:
    """What one call took, in ms; processor time is that of all threads."""

    wall: float
    processor: float


def take_turns(
    stock: Callable[[], None], baton: Callable[[], None], pairs: int
) -> tuple[list[Taken], list[Taken]]:
    """What each side's calls took, one after the other; the first pair is not counted."""
    times: tuple[list[Taken], list[Taken]] = ([], [])
    for pair in range(pairs + 1):
        sides = [(stock, times[0]), (baton, times[1])]
        for call, taken in sides if pair % 2 else reversed(sides):
            wall, processor = time.perf_counter(), time.process_time()
            call()
            taken.append(
                Taken((time.perf_counter() - wall) * 1e3, (time.process_time() - processor) * 1e3)
            )
    return times[0][1:], times[1][1:]


def report(name: str, stock: list[Taken], baton: list[Taken]) -> None:
    """One line of the table."""

    def spread(taken: list[Taken]) -> str:
        low, middle, high = statistics.quantiles((call.wall for call in taken), n=4)
        return f"{middle:8.1f} [{low:7.1f} {high:7.1f}]"

    pairs = list(zip(stock, baton, strict=True))
    by_wall = statistics.median(a.wall / b.wall for a, b in pairs)
    by_processor = statistics.median(a.processor / b.processor for a, b in pairs)
    print(
        f"{name:34} {spread(stock)} {spread(baton)} {len(pairs):4} {by_wall:6.2f} "
        f"{by_processor:6.2f}",
        flush=True,
    )


def bench(path: Path, dtype_name: str, threads: int, pairs: int, only: str) -> None:
    """The cases whose names contain `only`, for one dtype and number of threads."""
    dtype = _DTYPES[dtype_name]
    info = load_model_info(path)
    layout = KVLayout(
        model_digest=info.weights_digest,
        dtype=str(dtype).removeprefix("torch."),
        element_bytes=dtype.itemsize,
        num_layers=info.num_layers,
        num_kv_heads=info.num_kv_heads,
        head_dim=info.head_dim,
        block_size=_BLOCK_SIZE,
    )
    stock = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa")
    # Two loads of one file differ by a few percent in speed, by where their pages came to lie.
    shared = {id(parameter): parameter for parameter in stock.parameters()}
    runner, _ = build_runner(
        copy.deepcopy(stock, shared),
        info=info,
        layout=layout,
        num_blocks=1200,
        threads=threads,
    )
    generator = torch.manual_seed(0)

    def prompts(count: int, length: int) -> torch.Tensor:
        return torch.randint(0, info.vocab_size, (count, length), generator=generator)

    setting = f"{dtype_name} {threads} thread{'s' if threads > 1 else ''}"
    for batch, context in ((1, 128), (4, 128), (16, 128), (1, 1024), (16, 1024)):
        name = f"{setting}, decode {batch} x {context}"
        if only not in name:
            continue
        ids = prompts(batch, context)
        theirs, ours = StockSide(stock, ids), BatonSide(runner, ids, context + pairs + 8)
        theirs.step()
        ours.step()
        count = pairs if context < 1024 else max(4, pairs // 3)
        report(name, *take_turns(theirs.step, ours.step, count))
    for length, chunk in ((128, 128), (512, 512), (512, 256), (1500, 1500), (1500, 256)):
        name = f"{setting}, prefill {length} by {chunk}"
        if only not in name:
            continue
        ids = prompts(1, length)
        times = take_turns(
            lambda ids=ids, chunk=chunk: StockSide(stock, ids).prefill_chunks(chunk),
            lambda ids=ids, chunk=chunk: BatonSide(runner, ids, len(ids[0]) + 1).prefill_chunks(
                chunk
            ),
            max(4, pairs // 5),
        )
        report(name, *times)
    for batch in (1, 4):
        name = f"{setting}, generate {batch} x 128"
        if only not in name:
            continue
        ids = prompts(batch, 128)
        times = take_turns(
            lambda ids=ids: generate(stock, ids, 32),
            lambda ids=ids: BatonSide(runner, ids, 160).steps(32),
            max(4, pairs // 5),
        )
        report(name, *times)


def generate(model: torch.nn.Module, prompts: torch.Tensor, num_tokens: int) -> None:
    """What `BatonSide.steps` does from the start on, by transformers' `generate`."""
    model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=False,
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        pad_token_id=0,
    )


def main() -> None:
    """Parse the command line and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    default = Path.home() / ".cache/baton/models/smollm2-135m"
    parser.add_argument("--model", type=Path, default=default)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--dtypes", nargs="+", choices=sorted(_DTYPES), default=["fp32", "bf16"])
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--only", default="", help="part of the names of the cases to run")
    options = parser.parse_args()
    print(f"{'':34} {'transformers, ms':>26} {'Baton, ms':>26} {'n':>4} {'wall':>6} {'cpu':>6}")
    for dtype_name in options.dtypes:
        for threads in options.threads:
            bench(options.model, dtype_name, threads, options.pairs, options.only)


if __name__ == "__main__":
    main()
