"""What `baton check` finds out about this machine and prints about the plan for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from configs.schema import Settings
from deployments.terminal.tables import format_columns
from kv_transfer.geometry import KVLayout
from kv_transfer.shared_memory import can_share_memory
from workers.checks import Outcome, format_bytes
from workers.host import (
    available_bytes,
    available_cores,
    gpu_outlook,
    is_faster_in_bf16,
    rdma_outlook,
)
from workers.models.facts import find_snapshot, read_facts
from workers.models.store import ModelStore, default_cache_dir
from workers.planning import DeploymentPlan, WorkerPlan, plan

__all__ = ["plan_as_json", "plan_as_text", "plan_for_host"]

_MARKS = {Outcome.HOLDS: "ok", Outcome.WARNS: "warn", Outcome.FAILS: "FAIL"}
_HEADINGS = (
    "ROLE",
    "WORKERS",
    "THREADS",
    "BLOCKS",
    "TOKENS",
    "SIZE",
    "BLOCKS A WINDOW",
    "FULL WINDOWS",
)


def plan_for_host(settings: Settings, environ: Mapping[str, str]) -> DeploymentPlan:
    """The plan of a start here and now; downloads nothing. Raises ModelError."""
    store = ModelStore(default_cache_dir(environ), fetch_snapshot=find_snapshot)
    path = store.resolve(settings.model.source).path
    facts = read_facts(path, settings.model, is_faster_in_bf16=is_faster_in_bf16())
    is_host_memory = settings.model.device == "cpu"
    return plan(
        settings,
        facts,
        cores=available_cores(),
        available_bytes=available_bytes() if is_host_memory else None,
        shares_memory=can_share_memory(),
        rdma=rdma_outlook(settings.transfer),
        gpus=gpu_outlook(settings.model, environ),
    )


def plan_as_text(settings: Settings, deployment: DeploymentPlan) -> str:
    """The model, the pools (sizes are those of one worker), and each check with its numbers."""
    layout = deployment.decode.layout
    own = "" if settings.model.max_model_len else ", the model's own"
    prefix_cache = "on" if settings.kv.prefix_cache else "off"
    rows = [_HEADINGS, *(_row(worker) for worker in deployment.workers)]
    checks = [(_MARKS[check.outcome], check.id, check.sentence) for check in deployment.checks]
    return "\n".join(
        [
            f"Model   {settings.model.source}, served as {settings.model.served_name}",
            f"Window  {deployment.window} tokens{own}",
            f"KV      {format_bytes(layout.bytes_per_token)} per token, "
            f"{format_bytes(layout.bytes_per_block)} per block of {layout.block_size} tokens, "
            f"{layout.dtype}, prefix cache {prefix_cache}",
            *_repacked(deployment),
            *_sliding(layout),
            f"Pools   {format_bytes(deployment.total_pool_bytes)} in all",
            "",
            format_columns(rows),
            "",
            format_columns(checks),
        ]
    )


def plan_as_json(settings: Settings, deployment: DeploymentPlan) -> dict[str, Any]:
    """The same for programs; sizes in tokens and bytes."""
    layout = deployment.decode.layout
    return {
        "ok": deployment.ok,
        "model": {"source": settings.model.source, "name": settings.model.served_name},
        "window": deployment.window,
        "runner": asdict(deployment.runner),
        "kv": {
            "dtype": layout.dtype,
            "block_size": layout.block_size,
            "prefix_cache": settings.kv.prefix_cache,
            "groups": [
                {"layers": len(group.layers), "sliding_window": group.sliding_window}
                for group in layout.groups
            ],
            "bytes_per_token": layout.bytes_per_token,
            "bytes_per_block": layout.bytes_per_block,
        },
        "total_pool_bytes": deployment.total_pool_bytes,
        "workers": [_worker_as_json(worker) for worker in deployment.workers],
        "checks": [
            {"id": check.id, "outcome": check.outcome.value, "sentence": check.sentence}
            for check in deployment.checks
        ],
    }


def _worker_as_json(worker: WorkerPlan) -> dict[str, Any]:
    numbers = {name: value for name, value in asdict(worker).items() if name != "layout"}
    return {
        **numbers,
        "block_size": worker.layout.block_size,
        "bytes_per_block": worker.layout.bytes_per_block,
    }


def _repacked(deployment: DeploymentPlan) -> list[str]:
    """The blocks of prefill workers; nothing if they are decode's."""
    if deployment.prefill is None or not deployment.repacks:
        return []
    theirs = deployment.prefill.layout
    size = format_bytes(theirs.bytes_per_block)
    return [
        f"        {size} per block of {theirs.block_size} tokens on prefill, which decode repacks"
    ]


def _sliding(layout: KVLayout) -> list[str]:
    """Which part of a token's KV is given up when it is behind a window; nothing if none is."""
    layers: Counter[int] = Counter()
    for group in layout.groups:
        if group.sliding_window is not None:
            layers[group.sliding_window] += len(group.layers)
    return [
        f"        {format_bytes(count * layout.bytes_per_layer_token)} of that only while the "
        f"token is among the last {window} ({count} of {layout.num_layers} layers)"
        for window, count in layers.items()
    ]


def _row(worker: WorkerPlan) -> tuple[str, ...]:
    return (
        worker.role,
        str(worker.replicas),
        f"{worker.threads}+" if worker.shares_cores else str(worker.threads),
        str(worker.num_blocks),
        str(worker.pool_tokens),
        format_bytes(worker.pool_bytes),
        str(worker.window_blocks),
        str(worker.full_windows),
    )
