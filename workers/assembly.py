"""Builds the two kinds of worker from settings: model, pool, engine and hand-off, checked first.

The same steps as `baton check` shows: resolve the model, plan the sizes, refuse what breaks an
invariant, and only then read weights.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from configs.schema import Settings, TransferSettings
from kv_transfer.authentication import Secret
from kv_transfer.geometry import KVLayout
from kv_transfer.handoff import PeerInfo
from kv_transfer.receiver import KVReceiver
from kv_transfer.scratch import ScratchArenas
from kv_transfer.sender import KVSender
from kv_transfer.shared_memory import SharedRegion, can_share_memory, sharing_domain
from kv_transfer.transports.cuda_device import CudaDevice
from kv_transfer.transports.device_workspace import DeviceWorkspace
from kv_transfer.transports.link_security import LinkSecurity
from kv_transfer.transports.tls import TlsContexts
from kv_transfer.ucx_device import RdmaOutlook
from workers import planning
from workers.checks import enforce
from workers.core_table import CoreShare, join_core_table
from workers.decode import DecodeWorker
from workers.decode_config import DecodeConfig
from workers.engine.attention.core_aware import SharedThreads
from workers.engine.block_pool import BlockPool
from workers.engine.build import build_runner
from workers.engine.kv_cache import KVCache
from workers.engine.loop import Engine
from workers.engine.passing_thread import in_passing_thread
from workers.engine.prefix_cache import PrefixScope
from workers.engine.scheduler import Scheduler
from workers.engine.scheduler_config import SchedulerConfig
from workers.errors import WorkerError
from workers.handoff import PrefillService
from workers.host import available_cores, gpu_outlook, is_faster_in_bf16, rdma_outlook
from workers.models.facts import facts_from_info
from workers.models.loading import ModelInfo, load_model_info
from workers.models.store import ModelStore, default_cache_dir
from workers.planning import DeploymentPlan, WorkerPlan
from workers.prefill import PrefillWorker
from workers.transport_set import build_transports

logger = logging.getLogger(__name__)

_PLACED_BY_USER = frozenset({"OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY"})
"""Whoever sets one of these has said where OpenMP's threads run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A model that is here, and the plan of serving it on this host."""

    model_path: Path
    info: ModelInfo
    plan: DeploymentPlan
    rdma: RdmaOutlook


def survey(settings: Settings, environ: Mapping[str, str]) -> Site:
    """Find the model and plan its pools as on every other worker; nothing is loaded yet.

    Whether the memory suffices is asked once, by who starts all workers of a host: one worker
    sees neither the others' share nor, in a pod, the memory that they have.
    Raises `ModelError` where there is no such model, `WorkerError` (of which `PoolTooSmallError`
    is INV-POOL-WINDOW) where a check fails.
    """
    source = ModelStore(default_cache_dir(environ)).resolve(settings.model.source)
    info = load_model_info(source.path)
    rdma = rdma_outlook(settings.transfer)
    gpus = gpu_outlook(settings.model, environ)
    plan = planning.plan(
        settings,
        facts_from_info(info, settings.model, is_faster_in_bf16=is_faster_in_bf16()),
        cores=available_cores(),
        shares_memory=can_share_memory(),
        rdma=rdma,
        gpus=None if gpus is None else replace(gpus, num_gpus=None),  # the others have their own
    )
    enforce(plan.checks)
    return Site(model_path=source.path, info=info, plan=plan, rdma=rdma)


def build_prefill_worker(
    settings: Settings, *, worker_id: str, environ: Mapping[str, str], secret: Secret
) -> PrefillWorker:
    """A prefill worker, loaded and not yet started; blocks for the seconds that loading takes.

    Raises what `survey` raises, and `WorkerError` for certificates that cannot be used. `secret`
    is what it and decode workers know each other by.
    """
    site = survey(settings, environ)
    if site.plan.prefill is None:
        raise ValueError("these settings have no prefill pool")
    security = _link_security(settings.transfer, secret)
    gpu = _gpu(settings)
    region = None
    if gpu is None:
        region = _shared_region(settings.transfer.transport, site.plan.prefill.pool_bytes)
    engine, memory = _build_engine(site, site.plan.prefill, settings, environ, region)
    me = _peer_info(site.plan, site.plan.prefill, worker_id, gpu)
    transports = build_transports(
        settings.transfer,
        security,
        site.rdma,
        has_region=region is not None,
        gpu=gpu,
    )
    worker: PrefillWorker
    sender = KVSender(
        memory=memory,
        me=me,
        generation_of=engine.generation_of,
        transports=transports.usable,
        lease_s=settings.transfer.lease_s,
        on_end=lambda key, reason: worker.on_transfer_end(key, reason),
    )
    worker = PrefillWorker(engine=engine, sender=sender, layout=site.plan.prefill.layout)
    return worker


def build_decode_worker(
    settings: Settings,
    *,
    worker_id: str,
    environ: Mapping[str, str],
    prefill: PrefillService | None,
    secret: Secret,
) -> DecodeWorker:
    """A decode worker, loaded and not yet started; without `prefill` it is colocated.

    Raises as `build_prefill_worker`.
    """
    site = survey(settings, environ)
    security = None
    if prefill is not None:
        security = _link_security(settings.transfer, secret)
    engine, memory = _build_engine(
        site,
        site.plan.decode,
        settings,
        environ,
        region=None,
        gap_target_s=settings.decode.gap_target_s,
        gather_s=settings.decode.gather_s,
    )
    gpu = _gpu(settings)
    me = _peer_info(site.plan, site.plan.decode, worker_id, gpu)
    receiver = None
    if security is not None:
        transports = build_transports(
            settings.transfer,
            security,
            site.rdma,
            has_region=True,
            gpu=gpu,
        )
        receiver = KVReceiver(
            memory=memory,
            me=me,
            transports=transports.usable,
            broken=transports.broken,
            scratch=ScratchArenas(None if gpu is None else DeviceWorkspace(gpu)),
            lease_s=settings.transfer.lease_s,
        )
    return DecodeWorker(
        engine=engine,
        me=me,
        layout=site.plan.decode.layout,
        config=DecodeConfig(
            local_prefill_tokens=settings.decode.local_prefill_tokens,
            is_placed_by_cost=settings.decode.placement == "cost",
            transfer_deadline_s=settings.transfer.deadline_s,
        ),
        receiver=receiver,
        prefill=prefill,
    )


def _build_engine(
    site: Site,
    worker: WorkerPlan,
    settings: Settings,
    environ: Mapping[str, str],
    region: SharedRegion | None,
    gap_target_s: float | None = None,
    gather_s: float = 0.0,
) -> tuple[Engine, KVCache]:
    cores = _core_share(worker, settings)
    threads: int | SharedThreads = worker.threads
    if cores is not None and worker.shares_cores:
        threads = SharedThreads(
            count=cores.threads, are_placed=not _PLACED_BY_USER & environ.keys()
        )
    runner, memory = in_passing_thread(
        lambda: build_runner(
            site.model_path,
            info=site.info,
            layout=worker.layout,
            num_blocks=worker.num_blocks,
            max_model_len=site.plan.window,
            threads=threads,
            device=settings.model.device,
            region=region,
        )
    )
    pool = BlockPool(
        num_blocks=worker.num_blocks,
        block_size=worker.layout.block_size,
        max_model_len=site.plan.window,
        window_blocks=worker.window_blocks,
        sliding_windows=[group.sliding_window for group in worker.layout.groups],
    )
    config = SchedulerConfig(
        max_model_len=site.plan.window,
        max_sequences=worker.max_sequences,
        step_tokens=worker.step_tokens,
        prefill_chunk_tokens=worker.prefill_chunk_tokens,
        queue_limit=worker.queue_limit,
        step_target_s=worker.step_target_s,
        gap_target_s=gap_target_s,
    )
    scheduler = Scheduler(
        pool, config, _prefix_scope(worker.layout, settings), groups=worker.layout.groups
    )
    return Engine(scheduler, runner, cores=cores, gather_s=gather_s), memory


def _core_share(worker: WorkerPlan, settings: Settings) -> CoreShare | None:
    """This worker's part of the host's cores; None where nobody else is to know of it."""
    if settings.model.device == "cuda":
        return None
    fixed_threads = None if worker.shares_cores else worker.threads
    try:
        return join_core_table(cores=available_cores(), fixed_threads=fixed_threads)
    except OSError as error:
        logger.warning("cores are divided once for all threads=%s error=%s", worker.threads, error)
        return None


def _prefix_scope(layout: KVLayout, settings: Settings) -> PrefixScope | None:
    """What KV may be found for, or None where there is no prefix cache."""
    if not settings.kv.prefix_cache:
        return None
    return PrefixScope(fingerprint=layout.fingerprint, block_size=layout.block_size)


def _gpu(settings: Settings) -> CudaDevice | None:
    """The GPU of this worker: of those that Ray has booked for it, the only one that it sees."""
    return CudaDevice() if settings.model.device == "cuda" else None


def _peer_info(
    plan: DeploymentPlan, worker: WorkerPlan, worker_id: str, gpu: CudaDevice | None
) -> PeerInfo:
    return PeerInfo.of(
        worker.layout,
        worker_id=worker_id,
        incarnation=uuid.uuid4().hex,
        max_model_len=plan.window,
        pool_tokens=worker.pool_tokens,
        host=sharing_domain(),
        gpu="" if gpu is None else gpu.uuid,
    )


def _shared_region(transport: str, size_bytes: int) -> SharedRegion | None:
    """Memory for a pool that decode workers may read themselves; None where they are not to."""
    if transport not in ("auto", "shm"):
        return None
    try:
        return SharedRegion(size_bytes)
    except OSError as error:
        if transport == "shm":
            raise WorkerError(f"transport shm: no shared memory here: {error}") from error
        logger.warning("no shared memory, blocks go over tcp error=%s", error)
        return None


def _link_security(settings: TransferSettings, secret: Secret) -> LinkSecurity:
    """What a worker proves itself by, and its certificates where it has some."""
    tls = settings.tls
    if tls is None:
        return LinkSecurity(secret=secret)
    try:
        contexts = TlsContexts.load(
            certificate=Path(tls.certificate), key=Path(tls.key), ca=Path(tls.ca)
        )
    except (OSError, ValueError) as error:
        raise WorkerError(
            f"transfer.tls: certificate {tls.certificate}, key {tls.key} and ca {tls.ca} cannot "
            f"be used: {error}"
        ) from error
    return LinkSecurity(secret=secret, tls=contexts)
