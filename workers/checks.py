"""What must hold before a deployment starts: each invariant or rule, checked, with its sentence.

Pure: `baton check` prints what is found here, `baton serve` and every worker at its start enforce
it, with the same sentences.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from configs.addresses import is_loopback
from configs.schema import TransferSettings
from kv_transfer.compatibility import can_repack, check_compatible
from kv_transfer.handoff import PeerInfo
from kv_transfer.repack import ARENA_BYTES
from kv_transfer.transport import Capabilities, LinkRefusedError
from kv_transfer.transport_kinds import CAPABILITIES
from kv_transfer.transports.group_memory import GLOO_BYTES
from kv_transfer.transports.pair_table import MAX_PAIRS
from kv_transfer.ucx_device import NIXL_IS_MISSING, RdmaOutlook
from workers.errors import PoolTooSmallError, WorkerError
from workers.runner_choice import RunnerChoice

__all__ = [
    "INV_POOL_WINDOW",
    "Check",
    "Outcome",
    "Role",
    "check_capabilities",
    "check_cores",
    "check_data_path",
    "check_link",
    "check_memory",
    "check_pool_window",
    "check_runner",
    "check_transfer",
    "check_transport",
    "check_window",
    "enforce",
    "format_bytes",
    "takes_nixl",
]

Role = Literal["decode", "prefill"]

INV_POOL_WINDOW = "INV-POOL-WINDOW"


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
    """INV-POOL-WINDOW: two workers may hand over only with one window, held by both.

    In one layout, or in two of which one can be repacked into the other.
    """
    try:
        check_compatible(prefill, decode)
    except LinkRefusedError as error:
        sentence = f"{decode.worker_id} cannot take KV from {prefill.worker_id}: {error}."
        return Check(id=INV_POOL_WINDOW, outcome=Outcome.FAILS, sentence=sentence)
    layouts = "in one layout"
    if can_repack(prefill, decode):
        if prefill.bytes_per_block > ARENA_BYTES:
            sentence = (
                f"{decode.worker_id} cannot repack a block of {prefill.worker_id}: it has "
                f"{format_bytes(prefill.bytes_per_block)}, of {format_bytes(ARENA_BYTES)} at most; "
                "lower prefill.block_size."
            )
            return Check(id=INV_POOL_WINDOW, outcome=Outcome.FAILS, sentence=sentence)
        layouts = (
            f"in blocks of {decode.block_size} and {prefill.block_size} tokens, which "
            f"{decode.worker_id} repacks"
        )
    sentence = (
        f"{decode.worker_id} ({decode.pool_tokens} tokens) and {prefill.worker_id} "
        f"({prefill.pool_tokens}) both hold the window of {decode.max_model_len} {layouts}."
    )
    return Check(id=INV_POOL_WINDOW, outcome=Outcome.HOLDS, sentence=sentence)


def check_transfer(
    settings: TransferSettings, rdma: RdmaOutlook, *, shares_memory: bool
) -> list[Check]:
    """What the KV cache will move over, and who can get at it on each way that it may take."""
    return [
        check_transport(settings, shares_memory, rdma),
        *(
            check
            for transport in _candidates(settings, shares_memory, rdma)
            for check in (check_capabilities(transport), check_data_path(transport, settings))
        ),
    ]


def check_capabilities(
    transport: str, capabilities: Mapping[str, Capabilities] = CAPABILITIES
) -> Check:
    """What a transport needs of both workers; a statement, nothing can be wrong with it."""
    abilities = capabilities[transport]
    sends = "reads blocks by itself" if abilities.one_sided else "is given blocks by prefill"
    stops = ", and waits while prefill's process is stopped" if abilities.peer_must_poll else ""
    reach = "within and between hosts" if abilities.cross_host else "within a host"
    reach += {"any": "", "one": ", on one GPU", "two": ", from one GPU to another"}[abilities.gpus]
    kinds = " or ".join(sorted(abilities.memory_kinds))
    fence = {
        "on_close": "its session is closed",
        "on_abort": "its process group is aborted",
        "on_agent_restart": "its READs are done or decode's agent is ended",
    }[abilities.fence]
    return Check(
        id="CAPABILITIES",
        outcome=Outcome.HOLDS,
        sentence=f"{transport}: {reach}, for pools in {kinds} memory; decode {sends}{stops}; "
        f"blocks of a failed transfer stay unused until {fence}.",
    )


def check_data_path(
    transport: str,
    settings: TransferSettings,
    capabilities: Mapping[str, Capabilities] = CAPABILITIES,
) -> Check:
    """Who can get at the blocks that a transport moves; a warning where a network can."""
    path = capabilities[transport].data_path
    if path == "authenticated" and settings.tls is not None:
        path = "encrypted"
    outcome = Outcome.HOLDS
    if path in ("authenticated", "open") and not is_loopback(settings.host):
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


def takes_nixl(settings: TransferSettings, rdma: RdmaOutlook) -> bool:
    """Whether `auto` moves KV over nixl between hosts: never in the open what was to be encrypted.

    It may still not start; then it is tcp.
    """
    return settings.transport == "auto" and rdma.is_best and settings.tls is None


def _candidates(
    settings: TransferSettings, shares_memory: bool, rdma: RdmaOutlook
) -> tuple[str, ...]:
    """The transports that links may use, best first."""
    if settings.transport == "cuda_ipc":
        return ()
    if settings.transport != "auto":
        return (settings.transport,)
    within = ("shm",) if shares_memory else ()
    between = ("nixl", "tcp") if takes_nixl(settings, rdma) else ("tcp",)
    return within + between


def _network(settings: TransferSettings, rdma: RdmaOutlook) -> str:
    """What `auto` takes between hosts, and where it is not RDMA that there is, why."""
    if takes_nixl(settings, rdma):
        return "nixl"
    if rdma.is_best:
        return "tcp (not nixl, which transfer.tls does not encrypt)"
    if rdma.is_installed and rdma.is_rdma:
        return f"tcp (not nixl: {rdma.problem})"
    return "tcp"


def check_transport(settings: TransferSettings, shares_memory: bool, rdma: RdmaOutlook) -> Check:
    """What the KV cache will move over, and why."""
    outcome = Outcome.HOLDS
    wanted, network = settings.transport, _network(settings, rdma)
    if wanted == "nixl":
        return _check_nixl(rdma)
    if wanted == "cuda_ipc":
        sentence = "transfer.transport is cuda_ipc, but model.device is cpu: set it to auto."
        return Check(id="TRANSPORT", outcome=Outcome.FAILS, sentence=sentence)
    if wanted == "tcp":
        sentence = "KV moves over tcp: transfer.transport says so."
    elif wanted == "torch":
        sentence = (
            "KV moves over torch.distributed (Gloo): transfer.transport says so. A worker keeps up "
            f"to {MAX_PAIRS} process groups, which take {format_bytes(GLOO_BYTES)} at most."
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


def check_memory(
    *,
    pool_bytes: int,
    weight_bytes: int | None,
    available_bytes: int | None,
    group_bytes: int = 0,
    scratch_bytes: int = 0,
) -> Check:
    """All that workers take fits at once, when it is full; None is what is not known."""
    pools = f"{format_bytes(pool_bytes)} of KV pools"
    others = f", up to {format_bytes(group_bytes)} of process groups" if group_bytes else ""
    others += f", up to {format_bytes(scratch_bytes)} to repack in" if scratch_bytes else ""
    weights = "weights of a size that is not known"
    if weight_bytes is not None:
        weights = f"{format_bytes(weight_bytes)} of weights"
    needs = f"{pools}{others} and {weights}"
    if available_bytes is None:
        sentence = f"The workers need {needs}; how much memory there is, is not known."
        return Check(id="MEMORY", outcome=Outcome.WARNS, sentence=sentence)
    if pool_bytes + group_bytes + scratch_bytes + (weight_bytes or 0) <= available_bytes:
        sentence = f"The workers need {needs}; {format_bytes(available_bytes)} are available."
        return Check(id="MEMORY", outcome=Outcome.HOLDS, sentence=sentence)
    sentence = (
        f"The workers need {needs}, but only {format_bytes(available_bytes)} are available: size "
        "the pools by decode.engine.pool_tokens and prefill.engine.pool_tokens, or lower "
        "model.max_model_len."
    )
    return Check(id="MEMORY", outcome=Outcome.FAILS, sentence=sentence)


def check_cores(*, threads: int, cores: int, are_shared: bool) -> Check:
    """Every thread of a forward pass has a core; `are_shared` if workers take what others leave."""
    if are_shared:
        sentence = (
            f"The workers share {cores} cores: with {threads} threads when all of them compute, "
            f"with {cores} when one does."
        )
        outcome = Outcome.HOLDS if threads <= cores else Outcome.WARNS
        return Check(id="CORES", outcome=outcome, sentence=sentence)
    if threads <= cores:
        sentence = f"The workers run {threads} threads on {cores} cores."
        return Check(id="CORES", outcome=Outcome.HOLDS, sentence=sentence)
    sentence = (
        f"The workers run {threads} threads on {cores} cores: they will slow each other down."
    )
    return Check(id="CORES", outcome=Outcome.WARNS, sentence=sentence)


def format_bytes(num_bytes: int) -> str:
    """A size for people: 45.0 KiB, 2.11 GiB."""
    size, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    digits = 0 if unit == "B" else 2 if size < 10 else 1
    return f"{size:.{digits}f} {unit}"
