"""Sizes a deployment from settings and a model's facts, and says which invariants that satisfies.

Pure: `baton check` prints the plan, `baton serve` deploys it, and a worker at its start plans the
same. Nothing is clamped: a pool that is too small stays too small here and fails its check
(`workers.checks`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from configs.schema import (
    DecodeSettings,
    EngineSettings,
    ModelSettings,
    PrefillSettings,
    Settings,
    TransferSettings,
)
from kv_transfer.geometry import KVLayout
from kv_transfer.handoff import PeerInfo
from kv_transfer.repack import ARENA_BYTES
from kv_transfer.transports.group_memory import GLOO_BYTES
from kv_transfer.ucx_device import RdmaOutlook
from workers.checks import (
    Check,
    Role,
    check_cores,
    check_link,
    check_memory,
    check_pool_window,
    check_runner,
    check_transfer,
    check_window,
)
from workers.gpu_outlook import GpuOutlook, check_device, check_gpu_transfer, gpu_ways
from workers.runner_choice import Architecture, RunnerChoice, choose_runner

__all__ = [
    "DeploymentPlan",
    "ModelFacts",
    "WorkerPlan",
    "kv_layout",
    "plan",
    "resolve_dtype",
]

_FLOOR_TOKENS: Mapping[Role, int] = MappingProxyType({"decode": 49_152, "prefill": 0})
"""Tokens of a pool that nobody sized, where two windows are less: decode holds every running
sequence (48k tokens are 16 of 3k), prefill only prompts on their way out."""

_DEFAULT_WINDOWS = 2
"""Full windows in a pool that nobody sized: with one, a single long request would block all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What planning needs to know of a model, in the form in which it will be served."""

    digest: str
    context_length: int
    """The model's own window, in tokens."""
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    """Of the KV cache, in torch's spelling: "float32" or "bfloat16"."""
    element_bytes: int
    vocab_size: int
    architecture: Architecture
    sliding_windows: tuple[int | None, ...] = ()
    """By layer; empty if none has one."""
    weight_bytes: int | None = None
    """Of one worker's copy in that dtype; None where it is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlan:
    """What every worker of one role is started with."""

    role: Role
    replicas: int
    layout: KVLayout
    """Of its pool: roles may differ in the size of blocks."""
    threads: int
    """While all workers of the host compute."""
    shares_cores: bool
    """Whether it takes more while others have nothing to compute."""
    num_blocks: int
    pool_tokens: int
    """Tokens that the pool holds, in requests of the whole window."""
    pool_bytes: int
    window_blocks: int
    """Blocks that a request of the whole window needs at once, all groups of layers."""
    full_windows: int
    """Requests of a whole window that the pool holds at once."""
    max_sequences: int
    step_tokens: int
    prefill_chunk_tokens: int
    step_target_s: float | None
    queue_limit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentPlan:
    """Sizes of a whole deployment and the checks that it was put through."""

    window: int
    """max_model_len: tokens of a request at most, prompt and output together."""
    runner: RunnerChoice
    """By the configuration; a worker's checks at load have the last word."""
    workers: tuple[WorkerPlan, ...]
    """One plan for each role there is, decode first."""
    checks: tuple[Check, ...]

    @property
    def decode(self) -> WorkerPlan:
        """The plan of the decode workers."""
        return self.workers[0]

    @property
    def prefill(self) -> WorkerPlan | None:
        """The plan of the prefill workers; None when colocated."""
        return self.workers[1] if len(self.workers) > 1 else None

    @property
    def repacks(self) -> bool:
        """Whether what prefill hands over comes in blocks of another size."""
        return _repacks(self.workers)

    @property
    def total_pool_bytes(self) -> int:
        """KV bytes of all workers."""
        return sum(worker.replicas * worker.pool_bytes for worker in self.workers)

    @property
    def ok(self) -> bool:
        """Whether nothing speaks against starting."""
        return all(check.ok for check in self.checks)


def resolve_dtype(model: ModelSettings, *, is_faster_in_bf16: bool) -> tuple[str, int]:
    """The dtype of weights and KV, in torch's spelling, and the bytes of one element.

    `is_faster_in_bf16` is about this CPU.
    """
    dtype = model.dtype
    if dtype == "auto":
        dtype = "bf16" if model.device == "cuda" or is_faster_in_bf16 else "fp32"
    return ("float32", 4) if dtype == "fp32" else ("bfloat16", 2)


def plan(
    settings: Settings,
    facts: ModelFacts,
    *,
    cores: int,
    available_bytes: int | None = None,
    shares_memory: bool = False,
    rdma: RdmaOutlook | None = None,
    gpus: GpuOutlook | None = None,
) -> DeploymentPlan:
    """Size every pool and check the result; a plan that must not start has `ok` False.

    `cores` and `available_bytes` are those of the one host that all workers share; None is memory
    that is not known, which gives a warning. `shares_memory` is whether that host lets processes
    share some, `rdma` what nixl would find there, `gpus` what a model for GPUs would (None: it is
    for the CPU).
    """
    rdma = rdma or RdmaOutlook(is_installed=False, device="", is_rdma=False)
    window = settings.model.max_model_len or facts.context_length
    runner = choose_runner(facts.architecture, window=window)
    pools = _pools(settings)
    sizer = _Sizer(facts=facts, window=window, threads=_threads_each(pools, cores))
    workers = tuple(sizer.worker(pool) for pool in pools)
    checks = [
        check_runner(facts.architecture.model_type, runner),
        *_device_checks(gpus, pools),
        check_window(window=window, context_length=facts.context_length),
        # What was asked for counts, not the whole blocks that it was rounded up to: 8191 tokens are
        # below a window of 8192 even if the last block has room for one more.
        *(
            check_pool_window(
                pool.role, pool_tokens=pool.engine.pool_tokens or worker.pool_tokens, window=window
            )
            for pool, worker in zip(pools, workers, strict=True)
        ),
        *(check_link(sizer.peer(workers[0]), sizer.peer(worker)) for worker in workers[1:]),
        *(
            check
            for _ in workers[1:]
            for check in (
                check_transfer(settings.transfer, rdma, shares_memory=shares_memory)
                if gpus is None
                else check_gpu_transfer(settings.transfer, gpus.nccl)
            )
        ),
        _memory_check(
            workers,
            facts.weight_bytes,
            available_bytes,
            group_bytes=_group_bytes(settings.transfer, gpus) if settings.prefill else 0,
            scratch_bytes=_scratch_bytes(workers),
        ),
        check_cores(
            threads=total_threads(settings, cores=cores),
            cores=cores,
            are_shared=share_cores(settings),
        ),
    ]
    return DeploymentPlan(window=window, runner=runner, workers=workers, checks=tuple(checks))


def _device_checks(gpus: GpuOutlook | None, pools: Sequence[_Pool]) -> list[Check]:
    if gpus is None:
        return []
    shares = [pool.engine.gpu_share for pool in pools for _ in range(pool.replicas)]
    return [check_device(gpus, shares)]


def kv_layout(facts: ModelFacts, *, block_size: int, max_model_len: int) -> KVLayout:
    """How a model's KV is laid out; a sliding window that hides nothing is none."""
    sliding_windows = tuple(
        None if window is None or window >= max_model_len else window
        for window in facts.sliding_windows
    )
    return KVLayout(
        model_digest=facts.digest,
        dtype=facts.dtype,
        element_bytes=facts.element_bytes,
        num_layers=facts.num_layers,
        num_kv_heads=facts.num_kv_heads,
        head_dim=facts.head_dim,
        block_size=block_size,
        sliding_windows=sliding_windows,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pool:
    """What the settings say about one role."""

    role: Role
    replicas: int
    block_size: int
    engine: EngineSettings
    shares_cores: bool


def total_threads(settings: Settings, *, cores: int) -> int:
    """Threads of all workers' forward passes, on the one host with `cores` that they share."""
    pools = _pools(settings)
    each = _threads_each(pools, cores)
    return sum(pool.replicas * (pool.engine.threads or each) for pool in pools)


def share_cores(settings: Settings) -> bool:
    """Whether every worker takes as many threads as the others leave, at any moment."""
    return all(pool.shares_cores for pool in _pools(settings))


def _threads_each(pools: Sequence[_Pool], cores: int) -> int:
    """Of a worker whose settings name none."""
    return max(1, cores // sum(pool.replicas for pool in pools))


def _pools(settings: Settings) -> list[_Pool]:
    """The roles there are, decode first."""
    roles: list[tuple[Role, DecodeSettings | PrefillSettings | None]] = [
        ("decode", settings.decode),
        ("prefill", settings.prefill),
    ]
    on_cpu = settings.model.device == "cpu"
    return [
        _Pool(
            role=role,
            replicas=pool.replicas,
            block_size=_block_size(settings, pool),
            engine=pool.engine,
            shares_cores=on_cpu and pool.engine.threads is None,
        )
        for role, pool in roles
        if pool is not None
    ]


def _block_size(settings: Settings, pool: DecodeSettings | PrefillSettings) -> int:
    own = pool.block_size if isinstance(pool, PrefillSettings) else None
    return own or settings.kv.block_size


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizer:
    """What the sizes of all roles depend on."""

    facts: ModelFacts
    window: int
    threads: int

    def worker(self, pool: _Pool) -> WorkerPlan:
        """Size one role's workers."""
        engine = pool.engine
        layout = kv_layout(self.facts, block_size=pool.block_size, max_model_len=self.window)
        num_blocks = self._num_blocks(layout, pool.role, engine)
        window_blocks = self._blocks_for(layout, self.window, engine)
        return WorkerPlan(
            role=pool.role,
            replicas=pool.replicas,
            layout=layout,
            threads=engine.threads or self.threads,
            shares_cores=pool.shares_cores,
            num_blocks=num_blocks,
            pool_tokens=self._pool_tokens(layout, num_blocks, window_blocks),
            pool_bytes=num_blocks * layout.bytes_per_block,
            window_blocks=window_blocks,
            full_windows=num_blocks // window_blocks,
            max_sequences=engine.max_sequences,
            step_tokens=engine.step_tokens,
            prefill_chunk_tokens=engine.prefill_chunk_tokens,
            step_target_s=engine.step_target_s,
            queue_limit=engine.queue_limit,
        )

    def peer(self, worker: WorkerPlan) -> PeerInfo:
        """How a worker of the role will present itself to its peers."""
        return PeerInfo.of(
            worker.layout,
            worker_id=worker.role,
            incarnation="",  # there is no process yet
            max_model_len=self.window,
            pool_tokens=worker.pool_tokens,
        )

    def _num_blocks(self, layout: KVLayout, role: Role, engine: EngineSettings) -> int:
        if engine.pool_bytes is not None:
            return engine.pool_bytes // layout.bytes_per_block
        if engine.pool_tokens is not None:
            return self._blocks_for(layout, engine.pool_tokens, engine)
        windows = _DEFAULT_WINDOWS * self._blocks_for(layout, self.window, engine)
        return max(windows, self._blocks_for(layout, _FLOOR_TOKENS[role], engine))

    def _blocks_for(self, layout: KVLayout, num_tokens: int, engine: EngineSettings) -> int:
        """Blocks for so many tokens, in requests of the whole window and one of the rest.

        Behind a sliding window it matters in how many requests they are: each has its own.
        """
        if not layout.has_sliding_window:
            return layout.blocks_for(num_tokens)
        chunk_tokens = engine.prefill_chunk_tokens
        windows, rest = divmod(num_tokens, self.window)
        full = layout.sequence_blocks(self.window, chunk_tokens=chunk_tokens)
        return windows * full + layout.sequence_blocks(rest, chunk_tokens=chunk_tokens)

    def _pool_tokens(self, layout: KVLayout, num_blocks: int, window_blocks: int) -> int:
        """Tokens that blocks hold: the window or more exactly if they hold one whole request."""
        if not layout.has_sliding_window:
            return num_blocks * layout.block_size
        return num_blocks * self.window // window_blocks


def _group_bytes(transfer: TransferSettings, gpus: GpuOutlook | None) -> int:
    """Of one worker's process groups, as many as it may have; 0 where it makes none."""
    if gpus is None:
        return GLOO_BYTES if transfer.transport == "torch" else 0
    return gpus.nccl.worker_bytes if "torch" in gpu_ways(transfer) else 0


def _repacks(workers: Sequence[WorkerPlan]) -> bool:
    decode, *others = workers
    return any(worker.layout != decode.layout for worker in others)


def _scratch_bytes(workers: Sequence[WorkerPlan]) -> int:
    """Of all decode workers, where prefill's blocks are of another size."""
    return workers[0].replicas * ARENA_BYTES if _repacks(workers) else 0


def _memory_check(
    workers: Sequence[WorkerPlan],
    weight_bytes: int | None,
    available_bytes: int | None,
    *,
    group_bytes: int,
    scratch_bytes: int,
) -> Check:
    """`weight_bytes` and `group_bytes` are those of one worker."""
    num_workers = sum(worker.replicas for worker in workers)
    return check_memory(
        pool_bytes=sum(worker.replicas * worker.pool_bytes for worker in workers),
        weight_bytes=None if weight_bytes is None else num_workers * weight_bytes,
        available_bytes=available_bytes,
        group_bytes=num_workers * group_bytes,
        scratch_bytes=scratch_bytes,
    )
