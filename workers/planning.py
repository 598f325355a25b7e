"""Sizes a deployment from settings and a model's facts, and says which invariants that satisfies.

Pure: `baton check` prints the plan, `baton serve` deploys it, and a worker at its start enforces
the same checks with the same sentences. Nothing is clamped: a pool that is too small stays too
small here and fails its check.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Literal

from configs.schema import EngineSettings, ModelSettings, Settings, TransferSettings
from kv_transfer.compatibility import check_compatible
from kv_transfer.geometry import KVLayout
from kv_transfer.handoff import PeerInfo
from kv_transfer.transport import DataPath, LinkRefusedError
from kv_transfer.transports.pair_plan import MESSAGE_BYTES, WINDOW
from kv_transfer.transports.pair_table import MAX_PAIRS
from kv_transfer.ucx_device import NIXL_IS_MISSING, RdmaOutlook
from workers.errors import PoolTooSmallError, WorkerError
from workers.runner_choice import Architecture, RunnerChoice, choose_runner

__all__ = [
    "DATA_PATHS",
    "INV_POOL_WINDOW",
    "Check",
    "DeploymentPlan",
    "ModelFacts",
    "Outcome",
    "Role",
    "WorkerPlan",
    "check_data_path",
    "check_link",
    "check_pool_window",
    "check_runner",
    "check_transport",
    "check_window",
    "enforce",
    "format_bytes",
    "kv_layout",
    "plan",
    "resolve_dtype",
]

Role = Literal["decode", "prefill"]

INV_POOL_WINDOW = "INV-POOL-WINDOW"

DATA_PATHS: Mapping[str, DataPath] = MappingProxyType(
    {"shm": "host", "tcp": "authenticated", "nixl": "open", "torch": "open"}
)
"""What transports declare in their `Capabilities`, here since `baton check` loads none of them."""

_LOOPBACK = ("127.", "::1", "localhost")

_FLOOR_TOKENS: Mapping[Role, int] = MappingProxyType({"decode": 49_152, "prefill": 0})
"""Tokens of a pool that nobody sized, where two windows are less: decode holds every running
sequence (48k tokens are 16 of 3k), prefill only prompts on their way out."""

_DEFAULT_WINDOWS = 2
"""Full windows in a pool that nobody sized: with one, a single long request would block all."""


class Outcome(Enum):
    """What a check found."""

    HOLDS = "holds"
    FAILS = "fails"
    WARNS = "warns"
    """Not known to hold, but no reason to refuse the start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One invariant or rule, checked: its id, what was found, and a sentence with the numbers."""

    id: str
    outcome: Outcome
    sentence: str

    @property
    def ok(self) -> bool:
        """Whether a deployment may start in spite of it."""
        return self.outcome is not Outcome.FAILS


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
    threads: int
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
    queue_limit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentPlan:
    """Sizes of a whole deployment and the checks that it was put through."""

    layout: KVLayout
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
    def total_pool_bytes(self) -> int:
        """KV bytes of all workers."""
        return sum(worker.replicas * worker.pool_bytes for worker in self.workers)

    @property
    def ok(self) -> bool:
        """Whether nothing speaks against starting."""
        return all(check.ok for check in self.checks)


def resolve_dtype(model: ModelSettings, *, has_bf16_cpu: bool) -> tuple[str, int]:
    """The dtype of weights and KV, in torch's spelling, and the bytes of one element.

    `has_bf16_cpu` says whether this CPU multiplies bf16 in hardware; without it fp32 is faster.
    """
    dtype = model.dtype
    if dtype == "auto":
        dtype = "bf16" if model.device == "cuda" or has_bf16_cpu else "fp32"
    return ("float32", 4) if dtype == "fp32" else ("bfloat16", 2)


def plan(
    settings: Settings,
    facts: ModelFacts,
    *,
    cores: int,
    available_bytes: int | None = None,
    shares_memory: bool = False,
    rdma: RdmaOutlook | None = None,
) -> DeploymentPlan:
    """Size every pool and check the result; a plan that must not start has `ok` False.

    `cores` and `available_bytes` are those of the one host that all workers share; None is memory
    that is not known, which gives a warning. `shares_memory` is whether that host lets processes
    share some, `rdma` what nixl would find there.
    """
    rdma = rdma or RdmaOutlook(is_installed=False, device="", is_rdma=False)
    window = settings.model.max_model_len or facts.context_length
    runner = choose_runner(facts.architecture, window=window)
    layout = kv_layout(facts, block_size=settings.kv.block_size, max_model_len=window)
    pools = _pools(settings)
    num_workers = sum(pool.replicas for pool in pools)
    sizer = _Sizer(layout=layout, window=window, threads=max(1, cores // num_workers))
    workers = tuple(sizer.worker(pool) for pool in pools)
    checks = [
        check_runner(facts.architecture.model_type, runner),
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
            for check in check_transfer(settings.transfer, rdma, shares_memory=shares_memory)
        ),
        _check_memory(workers, facts.weight_bytes, available_bytes),
        _check_cores(workers, cores),
    ]
    return DeploymentPlan(
        layout=layout, window=window, runner=runner, workers=workers, checks=tuple(checks)
    )


def enforce(checks: Iterable[Check]) -> None:
    """Refuse to start with the first failed check's sentence.

    Raises PoolTooSmallError where it is INV-POOL-WINDOW, otherwise WorkerError.
    """
    for check in checks:
        if not check.ok:
            error = PoolTooSmallError if check.id == INV_POOL_WINDOW else WorkerError
            raise error(f"{check.id}: {check.sentence}")


def check_runner(model_type: str, runner: RunnerChoice) -> Check:
    """The model is of a kind that can be run, as far as its configuration shows."""
    if runner.tier == "refused":
        sentence = f"A model of type {model_type} cannot be served: {runner.reason}."
        return Check(id="RUNNER", outcome=Outcome.FAILS, sentence=sentence)
    sentence = f"The model is run as {runner.tier}: {runner.reason}."
    return Check(id="RUNNER", outcome=Outcome.HOLDS, sentence=sentence)


def check_window(*, window: int, context_length: int) -> Check:
    """The window is one that the model was trained for."""
    if window <= context_length:
        sentence = f"The window of {window} tokens is within the model's {context_length}."
        return Check(id="WINDOW", outcome=Outcome.HOLDS, sentence=sentence)
    sentence = (
        f"The window is set to {window} tokens, but the model knows {context_length}: lower "
        "model.max_model_len."
    )
    return Check(id="WINDOW", outcome=Outcome.FAILS, sentence=sentence)


def check_pool_window(role: Role, *, pool_tokens: int, window: int) -> Check:
    """INV-POOL-WINDOW: one worker's pool holds at least one request of a full window."""
    if pool_tokens >= window:
        sentence = f"The {role} pool holds {pool_tokens} tokens, the window is {window}."
        return Check(id=INV_POOL_WINDOW, outcome=Outcome.HOLDS, sentence=sentence)
    sentence = (
        f"The {role} pool holds {pool_tokens} tokens, but one request may take the window of "
        f"{window}: size {role}.engine for at least {window} tokens or lower model.max_model_len."
    )
    return Check(id=INV_POOL_WINDOW, outcome=Outcome.FAILS, sentence=sentence)


def check_link(decode: PeerInfo, prefill: PeerInfo) -> Check:
    """INV-POOL-WINDOW: two workers may hand over only with one layout, one window, held by both."""
    try:
        check_compatible(prefill, decode)
    except LinkRefusedError as error:
        sentence = f"{decode.worker_id} cannot take KV from {prefill.worker_id}: {error}."
        return Check(id=INV_POOL_WINDOW, outcome=Outcome.FAILS, sentence=sentence)
    sentence = (
        f"{decode.worker_id} ({decode.pool_tokens} tokens) and {prefill.worker_id} "
        f"({prefill.pool_tokens}) both hold the window of {decode.max_model_len} in one layout."
    )
    return Check(id=INV_POOL_WINDOW, outcome=Outcome.HOLDS, sentence=sentence)


def check_transfer(
    settings: TransferSettings, rdma: RdmaOutlook, *, shares_memory: bool
) -> list[Check]:
    """What the KV cache will move over, and who can get at it on each way that it may take."""
    return [
        check_transport(settings.transport, shares_memory, rdma),
        *(
            check_data_path(transport, settings)
            for transport in _candidates(settings.transport, shares_memory, rdma)
        ),
    ]


def check_data_path(transport: str, settings: TransferSettings) -> Check:
    """Who can get at the blocks that a transport moves; a warning where a network can."""
    path = DATA_PATHS[transport]
    if path == "authenticated" and settings.tls is not None:
        path = "encrypted"
    outcome = Outcome.HOLDS
    if path in ("authenticated", "open") and not settings.host.startswith(_LOOPBACK):
        outcome = Outcome.WARNS
    sentence = {
        "host": "both ends know the deployment's secret; blocks never leave this host's memory.",
        "encrypted": "both ends know the deployment's secret; blocks move inside TLS.",
        "authenticated": "both ends know the deployment's secret; blocks move unencrypted on "
        f"{settings.host}: transfer.tls encrypts them.",
        "open": "its data sockets ask nobody who they are and encrypt nothing; a network policy "
        f"has to keep strangers off {settings.host}.",
    }[path]
    return Check(id="DATA-PATH", outcome=outcome, sentence=f"{transport}: {sentence}")


def _candidates(wanted: str, shares_memory: bool, rdma: RdmaOutlook) -> tuple[str, ...]:
    """The transports that links may use, best first."""
    if wanted == "auto":
        within = ("shm",) if shares_memory else ()
        between = ("nixl", "tcp") if rdma.is_best else ("tcp",)
        return within + between
    return (wanted,)


def check_transport(wanted: str, shares_memory: bool, rdma: RdmaOutlook) -> Check:
    """What the KV cache will move over, and why; `wanted` is the setting."""
    outcome = Outcome.HOLDS
    network = "nixl" if rdma.is_best else "tcp"
    if wanted == "nixl":
        return _check_nixl(rdma)
    if wanted == "tcp":
        sentence = "KV moves over tcp: transfer.transport says so."
    elif wanted == "torch":
        staging = format_bytes(MAX_PAIRS * WINDOW * MESSAGE_BYTES)
        sentence = (
            "KV moves over torch.distributed (Gloo; NCCL was not run): transfer.transport says so. "
            f"A worker keeps up to {MAX_PAIRS} process groups, which take {staging} at most."
        )
    elif shares_memory:
        sentence = "KV moves over shm: the workers share this host's memory."
        if wanted == "auto":
            sentence = f"{sentence[:-1]}; between hosts it would be {network}."
    elif wanted == "auto":
        sentence = (
            f"KV moves over {network}: this host lets no process share memory (no sealed memfd)."
        )
    else:
        outcome = Outcome.FAILS
        sentence = (
            "transfer.transport is shm, but this host lets no process share memory (no sealed "
            "memfd): set it to auto, tcp or torch."
        )
    return Check(id="TRANSPORT", outcome=outcome, sentence=sentence)


def _check_nixl(rdma: RdmaOutlook) -> Check:
    if not rdma.is_installed:
        outcome, sentence = Outcome.FAILS, NIXL_IS_MISSING
    elif rdma.problem:
        outcome, sentence = Outcome.FAILS, f"transport nixl: {rdma.problem}."
    elif rdma.is_rdma:
        outcome = Outcome.HOLDS
        sentence = f"KV moves over nixl: RDMA on {rdma.device}, which no test has had so far."
    else:
        outcome = Outcome.WARNS
        sentence = (
            f"KV moves over nixl without RDMA, on {rdma.device or 'all devices'}: slower than tcp, "
            "and a decode worker that dies while it reads may take the prefill worker with it."
        )
    return Check(id="TRANSPORT", outcome=outcome, sentence=sentence)


def format_bytes(num_bytes: int) -> str:
    """A size for people: 45.0 KiB, 2.11 GiB."""
    size, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    digits = 0 if unit == "B" else 2 if size < 10 else 1
    return f"{size:.{digits}f} {unit}"


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
    engine: EngineSettings


def _pools(settings: Settings) -> list[_Pool]:
    """The roles there are, decode first."""
    decode, prefill = settings.decode, settings.prefill
    pools = [_Pool(role="decode", replicas=decode.replicas, engine=decode.engine)]
    if prefill is not None:
        pools.append(_Pool(role="prefill", replicas=prefill.replicas, engine=prefill.engine))
    return pools


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizer:
    """What the sizes of all roles depend on."""

    layout: KVLayout
    window: int
    threads: int

    def worker(self, pool: _Pool) -> WorkerPlan:
        """Size one role's workers."""
        engine = pool.engine
        num_blocks = self._num_blocks(pool.role, engine)
        window_blocks = self._blocks_for(self.window, engine)
        return WorkerPlan(
            role=pool.role,
            replicas=pool.replicas,
            threads=engine.threads or self.threads,
            num_blocks=num_blocks,
            pool_tokens=self._pool_tokens(num_blocks, window_blocks),
            pool_bytes=num_blocks * self.layout.bytes_per_block,
            window_blocks=window_blocks,
            full_windows=num_blocks // window_blocks,
            max_sequences=engine.max_sequences,
            step_tokens=engine.step_tokens,
            prefill_chunk_tokens=engine.prefill_chunk_tokens,
            queue_limit=engine.queue_limit,
        )

    def peer(self, worker: WorkerPlan) -> PeerInfo:
        """How a worker of the role will present itself to its peers."""
        return PeerInfo.of(
            self.layout,
            worker_id=worker.role,
            incarnation="",  # there is no process yet
            max_model_len=self.window,
            pool_tokens=worker.pool_tokens,
        )

    def _num_blocks(self, role: Role, engine: EngineSettings) -> int:
        if engine.pool_bytes is not None:
            return engine.pool_bytes // self.layout.bytes_per_block
        if engine.pool_tokens is not None:
            return self._blocks_for(engine.pool_tokens, engine)
        windows = _DEFAULT_WINDOWS * self._blocks_for(self.window, engine)
        return max(windows, self._blocks_for(_FLOOR_TOKENS[role], engine))

    def _blocks_for(self, num_tokens: int, engine: EngineSettings) -> int:
        """Blocks for so many tokens, in requests of the whole window and one of the rest.

        Behind a sliding window it matters in how many requests they are: each has its own.
        """
        if not self.layout.has_sliding_window:
            return self.layout.blocks_for(num_tokens)
        chunk_tokens = engine.prefill_chunk_tokens
        windows, rest = divmod(num_tokens, self.window)
        full = self.layout.sequence_blocks(self.window, chunk_tokens=chunk_tokens)
        return windows * full + self.layout.sequence_blocks(rest, chunk_tokens=chunk_tokens)

    def _pool_tokens(self, num_blocks: int, window_blocks: int) -> int:
        """Tokens that blocks hold: the window or more exactly if they hold one whole request."""
        if not self.layout.has_sliding_window:
            return num_blocks * self.layout.block_size
        return num_blocks * self.window // window_blocks


def _check_memory(
    workers: Sequence[WorkerPlan], weight_bytes: int | None, available_bytes: int | None
) -> Check:
    """All pools and weights fit the host at once, when full."""
    pools = sum(worker.replicas * worker.pool_bytes for worker in workers)
    weights = sum(worker.replicas for worker in workers) * (weight_bytes or 0)
    total = pools + weights
    needs = f"{format_bytes(pools)} of KV pools and {format_bytes(weights)} of weights"
    if weight_bytes is None:
        needs = f"{format_bytes(pools)} of KV pools and weights of a size that is not known"
    if available_bytes is None:
        sentence = f"The workers need {needs}; how much memory there is, is not known."
        return Check(id="MEMORY", outcome=Outcome.WARNS, sentence=sentence)
    if total <= available_bytes:
        sentence = f"The workers need {needs}; {format_bytes(available_bytes)} are available."
        return Check(id="MEMORY", outcome=Outcome.HOLDS, sentence=sentence)
    sentence = (
        f"The workers need {needs}, but only {format_bytes(available_bytes)} are available: size "
        "the pools by decode.engine.pool_tokens and prefill.engine.pool_tokens, or lower "
        "model.max_model_len."
    )
    return Check(id="MEMORY", outcome=Outcome.FAILS, sentence=sentence)


def _check_cores(workers: Sequence[WorkerPlan], cores: int) -> Check:
    """Every thread of a forward pass has a core."""
    threads = sum(worker.replicas * worker.threads for worker in workers)
    if threads <= cores:
        sentence = f"The workers run {threads} threads on {cores} cores."
        return Check(id="CORES", outcome=Outcome.HOLDS, sentence=sentence)
    sentence = (
        f"The workers run {threads} threads on {cores} cores: they will slow each other down."
    )
    return Check(id="CORES", outcome=Outcome.WARNS, sentence=sentence)
