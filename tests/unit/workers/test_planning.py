from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.schema import (
    DecodeSettings,
    EngineSettings,
    KVSettings,
    ModelSettings,
    PrefillSettings,
    Settings,
    TlsSettings,
    TransferSettings,
)
from kv_transfer.repack import ARENA_BYTES
from kv_transfer.transports.group_memory import GLOO_BYTES, NcclMemory
from kv_transfer.ucx_device import RdmaOutlook
from workers.checks import INV_POOL_WINDOW, Check, Outcome, enforce, format_bytes
from workers.errors import PoolTooSmallError, WorkerError
from workers.gpu_outlook import GpuOutlook
from workers.planning import DeploymentPlan, ModelFacts, plan, resolve_dtype
from workers.runner_choice import Architecture

RDMA = RdmaOutlook(is_installed=True, device="mlx5_0:1", is_rdma=True)

FACTS = ModelFacts(
    digest="d",
    context_length=8192,
    num_layers=30,
    num_kv_heads=3,
    head_dim=64,
    dtype="float32",
    element_bytes=4,
    vocab_size=49152,
    architecture=Architecture(model_type="llama"),
    weight_bytes=500_000_000,
)
BYTES_PER_TOKEN = 30 * 2 * 3 * 64 * 4


def settings_of(
    *,
    decode: EngineSettings | None = None,
    prefill: EngineSettings | None = None,
    replicas: int = 1,
    is_split: bool = True,
    max_model_len: int | None = None,
    block_size: int = 16,
    prefill_block_size: int | None = None,
) -> Settings:
    pool = PrefillSettings(
        replicas=replicas,
        engine=prefill or EngineSettings(),
        block_size=prefill_block_size,
    )
    return Settings(
        model=ModelSettings(max_model_len=max_model_len),
        kv=KVSettings(block_size=block_size),
        decode=DecodeSettings(replicas=replicas, engine=decode or EngineSettings()),
        prefill=pool if is_split else None,
    )


def checks_of(deployment: DeploymentPlan, check_id: str) -> list[Check]:
    return [check for check in deployment.checks if check.id == check_id]


def test_unsized_pools_hold_two_windows_and_decode_its_floor() -> None:
    deployment = plan(settings_of(), FACTS, cores=2)

    assert deployment.decode.pool_tokens == 49_152
    assert deployment.decode.pool_bytes == 49_152 * BYTES_PER_TOKEN
    assert deployment.decode.full_windows == 6
    assert deployment.prefill is not None
    assert deployment.prefill.pool_tokens == 2 * 8192
    assert deployment.prefill.full_windows == 2
    assert deployment.total_pool_bytes == (49_152 + 16_384) * BYTES_PER_TOKEN
    assert deployment.ok


def windowed(*windows: int | None, settings: Settings | None = None) -> DeploymentPlan:
    facts = replace(FACTS, num_layers=len(windows), sliding_windows=windows)
    return plan(settings or settings_of(), facts, cores=2)


def test_request_behind_a_window_needs_the_windows_blocks_and_a_chunks() -> None:
    deployment = windowed(1024, 1024)

    # 1023 tokens before a chunk of 256, in blocks of 16 that it need not begin with.
    assert deployment.decode.window_blocks == 81
    assert deployment.decode.full_windows == 6
    assert deployment.decode.num_blocks == 6 * 81
    assert deployment.decode.pool_tokens == 49_152
    assert deployment.prefill is not None
    assert deployment.prefill.num_blocks == 2 * 81
    assert deployment.ok


def test_mixed_model_needs_both_kinds_of_blocks_of_half_the_size() -> None:
    deployment = windowed(1024, None)

    assert deployment.decode.layout.bytes_per_block == 16 * 2 * 3 * 64 * 4
    assert deployment.decode.window_blocks == 512 + 81


def test_pool_that_holds_no_window_over_all_groups_is_refused() -> None:
    block = 16 * 2 * 3 * 64 * 4
    for num_blocks, is_held in ((512 + 81, True), (512 + 80, False)):
        engine = EngineSettings(pool_bytes=num_blocks * block)
        deployment = windowed(1024, None, settings=settings_of(decode=engine))
        checks = checks_of(deployment, INV_POOL_WINDOW)
        assert all(check.ok for check in checks) is is_held
        assert (deployment.decode.pool_tokens >= 8192) is is_held
        assert deployment.decode.full_windows == is_held


def test_window_that_hides_nothing_is_none() -> None:
    deployment = windowed(8192, 4096, settings=settings_of(max_model_len=4096))

    assert not deployment.decode.layout.has_sliding_window
    assert deployment.decode.window_blocks == 256


def test_unsized_decode_pool_grows_with_the_window() -> None:
    facts = replace(FACTS, context_length=32_768)

    deployment = plan(settings_of(), facts, cores=2)

    assert deployment.decode.pool_tokens == 2 * 32_768


def test_colocated_deployment_has_no_prefill_plan_and_no_link() -> None:
    deployment = plan(settings_of(is_split=False), FACTS, cores=2)

    assert deployment.prefill is None
    assert [worker.role for worker in deployment.workers] == ["decode"]
    assert len(checks_of(deployment, INV_POOL_WINDOW)) == 1


def test_pool_bytes_are_never_exceeded() -> None:
    engine = EngineSettings(pool_bytes=10_000 * BYTES_PER_TOKEN)

    deployment = plan(settings_of(decode=engine), FACTS, cores=2)

    assert deployment.decode.pool_tokens == 10_000
    assert deployment.decode.pool_bytes == 10_000 * BYTES_PER_TOKEN


def test_pool_bytes_below_one_block_fail_rather_than_crash() -> None:
    deployment = plan(settings_of(decode=EngineSettings(pool_bytes=1)), FACTS, cores=2)

    assert deployment.decode.num_blocks == 0
    assert deployment.decode.full_windows == 0
    assert not deployment.ok


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_pool_tokens_below_the_window_are_refused_with_both_numbers(role: str) -> None:
    # 8191 tokens round up to blocks that hold 8192, but the window was not asked for.
    too_small = EngineSettings(pool_tokens=8191)
    sizes = {role: too_small}

    deployment = plan(settings_of(**sizes), FACTS, cores=2)  # type: ignore[arg-type]  # by role

    assert not deployment.ok
    failed = [check for check in deployment.checks if not check.ok]
    assert {check.id for check in failed} == {INV_POOL_WINDOW}
    assert f"{role} pool holds 8191 tokens" in failed[0].sentence
    assert "window of 8192" in failed[0].sentence
    with pytest.raises(PoolTooSmallError, match="8191"):
        enforce(deployment.checks)


def test_pool_of_exactly_the_window_holds_one_request() -> None:
    engine = EngineSettings(pool_tokens=1001)
    settings = settings_of(decode=engine, prefill=engine, max_model_len=1001)

    deployment = plan(settings, FACTS, cores=2)

    assert deployment.ok
    assert deployment.decode.full_windows == 1


def test_small_pool_fails_the_link_as_well() -> None:
    deployment = plan(settings_of(prefill=EngineSettings(pool_tokens=4096)), FACTS, cores=2)

    link = checks_of(deployment, INV_POOL_WINDOW)[-1]
    assert not link.ok
    assert "prefill holds 4096 tokens" in link.sentence


def test_window_above_the_models_context_is_refused() -> None:
    deployment = plan(settings_of(max_model_len=8193), FACTS, cores=2)

    [check] = checks_of(deployment, "WINDOW")
    assert not check.ok
    assert "8193" in check.sentence
    assert "8192" in check.sentence
    with pytest.raises(WorkerError, match="WINDOW") as refusal:
        enforce(deployment.checks)
    assert not isinstance(refusal.value, PoolTooSmallError)


def test_window_may_be_smaller_than_the_models_context() -> None:
    deployment = plan(settings_of(max_model_len=1024), FACTS, cores=2)

    assert deployment.window == 1024
    assert deployment.ok
    enforce(deployment.checks)


@pytest.mark.parametrize(
    ("available", "outcome"),
    [(None, Outcome.WARNS), (10**9, Outcome.FAILS), (10**11, Outcome.HOLDS)],
)
def test_memory_is_checked_against_what_is_available(
    available: int | None, outcome: Outcome
) -> None:
    deployment = plan(settings_of(), FACTS, cores=2, available_bytes=available)

    [check] = checks_of(deployment, "MEMORY")
    assert check.outcome is outcome
    assert deployment.ok is (outcome is not Outcome.FAILS)


def test_memory_counts_each_workers_weights() -> None:
    pools = (49_152 + 16_384) * BYTES_PER_TOKEN
    needed = pools + 2 * 500_000_000

    assert plan(settings_of(), FACTS, cores=2, available_bytes=needed).ok
    assert not plan(settings_of(), FACTS, cores=2, available_bytes=needed - 1).ok


def test_memory_counts_each_workers_process_groups() -> None:
    torch = TransferSettings(transport="torch")
    settings = settings_of().model_copy(update={"transfer": torch})
    needed = (49_152 + 16_384) * BYTES_PER_TOKEN + 2 * 500_000_000 + 2 * GLOO_BYTES

    assert plan(settings, FACTS, cores=2, available_bytes=needed).ok
    assert not plan(settings, FACTS, cores=2, available_bytes=needed - 1).ok
    alone = settings_of(is_split=False).model_copy(update={"transfer": torch})
    [check] = checks_of(plan(alone, FACTS, cores=2), "MEMORY")
    assert "process groups" not in check.sentence


def test_memory_says_when_the_weights_are_not_known() -> None:
    facts = replace(FACTS, weight_bytes=None)

    deployment = plan(settings_of(), facts, cores=2, available_bytes=10**11)

    [check] = checks_of(deployment, "MEMORY")
    assert check.ok
    assert "not known" in check.sentence


@pytest.mark.parametrize(
    ("cores", "replicas", "threads"), [(8, 1, 4), (8, 2, 2), (7, 2, 1), (1, 2, 1)]
)
def test_cores_are_divided_among_the_workers(cores: int, replicas: int, threads: int) -> None:
    deployment = plan(settings_of(replicas=replicas), FACTS, cores=cores)

    assert {worker.threads for worker in deployment.workers} == {threads}


def test_more_threads_than_cores_is_a_warning() -> None:
    engine = EngineSettings(threads=3)

    deployment = plan(settings_of(decode=engine), FACTS, cores=2)

    [check] = checks_of(deployment, "CORES")
    assert check.outcome is Outcome.WARNS
    assert "4 threads on 2 cores" in check.sentence
    assert deployment.ok


def test_workers_without_a_number_of_threads_take_what_others_leave() -> None:
    deployment = plan(settings_of(prefill=EngineSettings(threads=1)), FACTS, cores=4)
    assert [worker.shares_cores for worker in deployment.workers] == [True, False]

    [check] = checks_of(plan(settings_of(), FACTS, cores=4), "CORES")
    assert check.sentence.endswith("with 4 threads when all of them compute, with 4 when one does.")
    [check] = checks_of(plan(settings_of(), FACTS, cores=1), "CORES")
    assert check.outcome is Outcome.WARNS


@pytest.mark.parametrize(
    ("wanted", "shares_memory", "names"),
    [
        ("auto", True, ["shm", "tcp"]),
        ("auto", False, ["tcp"]),
        ("tcp", True, ["tcp"]),
        ("shm", True, ["shm"]),
        ("torch", True, ["torch"]),
    ],
)
def test_each_way_that_kv_may_take_has_its_sentence(
    wanted: str, shares_memory: bool, names: list[str]
) -> None:
    settings = settings_of().model_copy(update={"transfer": TransferSettings(transport=wanted)})  # type: ignore[arg-type]

    deployment = plan(settings, FACTS, cores=2, shares_memory=shares_memory)

    paths = checks_of(deployment, "DATA-PATH")
    assert [check.sentence.partition(":")[0] for check in paths] == names


def test_auto_may_take_nixl_between_hosts_where_it_is_best() -> None:
    deployment = plan(settings_of(), FACTS, cores=2, shares_memory=True, rdma=RDMA)

    paths = checks_of(deployment, "DATA-PATH")
    assert [check.sentence.partition(":")[0] for check in paths] == ["shm", "nixl", "tcp"]


def test_only_a_deployment_with_links_has_a_transport() -> None:
    split = plan(settings_of(), FACTS, cores=2, shares_memory=True)
    colocated = plan(settings_of(is_split=False), FACTS, cores=2, shares_memory=True)

    assert len(checks_of(split, "TRANSPORT")) == 1
    assert checks_of(colocated, "TRANSPORT") == []


def test_worker_plan_carries_the_engines_limits() -> None:
    engine = EngineSettings(
        max_sequences=3,
        step_tokens=40,
        prefill_chunk_tokens=20,
        step_target_s=0.3,
        queue_limit=5,
        threads=1,
    )

    decode = plan(settings_of(decode=engine), FACTS, cores=2).decode

    assert decode.max_sequences == 3
    assert decode.step_tokens == 40
    assert decode.prefill_chunk_tokens == 20
    assert decode.step_target_s == 0.3
    assert decode.queue_limit == 5


def test_layout_follows_facts_and_block_size() -> None:
    layout = plan(settings_of(block_size=32), FACTS, cores=2).decode.layout

    assert layout.bytes_per_token == BYTES_PER_TOKEN
    assert layout.block_size == 32
    assert layout.model_digest == "d"
    assert layout.dtype == "float32"


def test_prefill_may_have_blocks_of_its_own_size() -> None:
    deployment = plan(settings_of(prefill_block_size=48, replicas=2), FACTS, cores=2)

    assert deployment.ok
    assert deployment.repacks
    assert deployment.prefill is not None
    assert deployment.decode.layout.block_size == 16
    assert deployment.prefill.layout.block_size == 48
    assert deployment.prefill.pool_bytes == deployment.prefill.num_blocks * 48 * BYTES_PER_TOKEN
    *_, link = checks_of(deployment, "INV-POOL-WINDOW")
    assert "in blocks of 16 and 48 tokens, which decode repacks" in link.sentence
    (memory,) = checks_of(deployment, "MEMORY")
    assert "up to 256.0 MiB to repack in" in memory.sentence


def test_what_is_repacked_in_counts_as_memory() -> None:
    settings = settings_of(prefill_block_size=48)
    needed = plan(settings, FACTS, cores=2).total_pool_bytes + ARENA_BYTES

    for available, ok in ((needed, True), (needed - 1, False)):
        facts = replace(FACTS, weight_bytes=0)
        assert plan(settings, facts, cores=2, available_bytes=available).ok is ok


@pytest.mark.parametrize(("differs", "ok"), [(0, True), (1, False)])
def test_a_block_that_decode_has_no_room_to_repack_is_refused_at_the_start(
    differs: int, ok: bool
) -> None:
    most = ARENA_BYTES // BYTES_PER_TOKEN
    deployment = plan(settings_of(prefill_block_size=most + differs), FACTS, cores=2)

    assert deployment.ok is ok
    if not ok:
        *_, link = checks_of(deployment, "INV-POOL-WINDOW")
        assert "lower prefill.block_size" in link.sentence


@given(
    context_length=st.integers(1, 200_000),
    block_size=st.integers(1, 300),
    prefill_block_size=st.none() | st.integers(1, 300),
    decode_tokens=st.none() | st.integers(1, 300_000),
    prefill_tokens=st.none() | st.integers(1, 300_000),
    max_model_len=st.none() | st.integers(1, 200_000),
)
def test_a_plan_is_ok_exactly_when_every_pool_was_asked_to_hold_the_window(
    context_length: int,
    block_size: int,
    prefill_block_size: int | None,
    decode_tokens: int | None,
    prefill_tokens: int | None,
    max_model_len: int | None,
) -> None:
    settings = settings_of(
        decode=EngineSettings(pool_tokens=decode_tokens),
        prefill=EngineSettings(pool_tokens=prefill_tokens),
        max_model_len=max_model_len,
        block_size=block_size,
        prefill_block_size=prefill_block_size,
    )

    deployment = plan(settings, replace(FACTS, context_length=context_length), cores=4)

    window = max_model_len or context_length
    asked = [tokens for tokens in (decode_tokens, prefill_tokens) if tokens is not None]
    expected = window <= context_length and all(tokens >= window for tokens in asked)
    assert deployment.ok is expected
    if deployment.ok:
        assert all(worker.full_windows >= 1 for worker in deployment.workers)
        assert all(worker.pool_tokens >= window for worker in deployment.workers)


@pytest.mark.parametrize(
    ("dtype", "device", "is_faster_in_bf16", "expected"),
    [
        ("auto", "cpu", False, ("float32", 4)),
        ("auto", "cpu", True, ("bfloat16", 2)),
        ("auto", "cuda", False, ("bfloat16", 2)),
        ("fp32", "cuda", True, ("float32", 4)),
        ("bf16", "cpu", False, ("bfloat16", 2)),
    ],
)
def test_dtype_is_resolved_by_the_device(
    dtype: str, device: str, is_faster_in_bf16: bool, expected: tuple[str, int]
) -> None:
    model = ModelSettings.model_validate({"dtype": dtype, "device": device})

    assert resolve_dtype(model, is_faster_in_bf16=is_faster_in_bf16) == expected


@pytest.mark.parametrize(
    ("outlook", "outcome", "sentence"),
    [
        (GpuOutlook(num_gpus=2), Outcome.WARNS, "book 2 GPUs of the 2 that are here"),
        (GpuOutlook(num_gpus=None), Outcome.WARNS, "book 2 GPUs; Baton was not run on a GPU"),
        (GpuOutlook(num_gpus=1), Outcome.FAILS, "book 2 GPUs and there are 1: lower decode"),
        (GpuOutlook(num_gpus=0, obstacle="there is none"), Outcome.FAILS, "but there is none: "),
    ],
)
def test_a_model_for_gpus_needs_one_for_each_worker(
    outlook: GpuOutlook, outcome: Outcome, sentence: str
) -> None:
    deployment = plan(settings_of(), FACTS, cores=2, gpus=outlook)

    [check] = checks_of(deployment, "DEVICE")
    assert check.outcome is outcome
    assert sentence in check.sentence


def test_workers_may_share_a_gpu() -> None:
    half = EngineSettings(gpu_share=0.5)

    outlook = GpuOutlook(num_gpus=1)

    assert plan(settings_of(decode=half, prefill=half), FACTS, cores=2, gpus=outlook).ok


def test_a_model_for_the_cpu_is_asked_nothing_about_gpus() -> None:
    assert not checks_of(plan(settings_of(), FACTS, cores=2), "DEVICE")


@pytest.mark.parametrize(
    ("transfer", "outcome", "ways"),
    [
        (TransferSettings(), Outcome.WARNS, ["cuda_ipc", "torch", "tcp"]),
        (TransferSettings(transport="torch"), Outcome.WARNS, ["torch"]),
        (TransferSettings(transport="tcp"), Outcome.WARNS, ["tcp"]),
        (TransferSettings(transport="cuda_ipc"), Outcome.WARNS, ["cuda_ipc"]),
        (TransferSettings(transport="shm"), Outcome.FAILS, []),
        (TransferSettings(transport="nixl"), Outcome.FAILS, []),
    ],
)
def test_between_gpus_each_way_is_named_and_said_not_to_have_been_run(
    transfer: TransferSettings, outcome: Outcome, ways: list[str]
) -> None:
    settings = settings_of().model_copy(
        update={"model": ModelSettings(device="cuda"), "transfer": transfer}
    )

    deployment = plan(settings, FACTS, cores=2, gpus=GpuOutlook(num_gpus=2))

    [check] = checks_of(deployment, "TRANSPORT")
    assert check.outcome is outcome
    assert ("not run" in check.sentence or "was run on a GPU so far" in check.sentence) is bool(
        ways
    )
    for check_id in ("CAPABILITIES", "DATA-PATH"):
        found = [each.sentence.partition(":")[0] for each in checks_of(deployment, check_id)]
        assert found == ways
    assert ("By NCCL's documentation and sources, not run: " in check.sentence) is ("torch" in ways)


@pytest.mark.parametrize(
    ("nccl", "says"),
    [
        (
            NcclMemory(),
            "16 process groups take 1.31 GiB of GPU memory beside its pool, 84.0 MiB each, with 4 "
            "channels of 9.19 MiB in each direction;",
        ),
        (
            NcclMemory(channels=8, buffer_bytes=2**21),
            "16 process groups take 576.0 MiB of GPU memory beside its pool, 36.0 MiB each, with 8 "
            "channels of 2.00 MiB in each direction;",
        ),
    ],
)
def test_between_gpus_nccls_memory_is_named_and_counted(nccl: NcclMemory, says: str) -> None:
    settings = settings_of().model_copy(update={"model": ModelSettings(device="cuda")})

    deployment = plan(settings, FACTS, cores=2, gpus=GpuOutlook(num_gpus=2, nccl=nccl))

    [transport] = checks_of(deployment, "TRANSPORT")
    assert says in transport.sentence
    [memory] = checks_of(deployment, "MEMORY")
    of_both_workers = format_bytes(2 * nccl.worker_bytes)
    assert f", up to {of_both_workers} of process groups and " in memory.sentence


def test_between_gpus_nothing_goes_past_the_certificates() -> None:
    tls = TlsSettings(certificate="a.pem", key="a.key", ca="ca.pem")
    settings = settings_of().model_copy(
        update={"model": ModelSettings(device="cuda"), "transfer": TransferSettings(tls=tls)}
    )

    deployment = plan(settings, FACTS, cores=2, gpus=GpuOutlook(num_gpus=2))

    [check] = checks_of(deployment, "TRANSPORT")
    assert "NCCL" not in check.sentence
    [memory] = checks_of(deployment, "MEMORY")
    assert "process groups" not in memory.sentence


def test_cuda_ipc_of_a_model_on_the_cpu_is_refused() -> None:
    settings = settings_of().model_copy(update={"transfer": TransferSettings(transport="cuda_ipc")})

    [check] = checks_of(plan(settings, FACTS, cores=2), "TRANSPORT")

    assert check.outcome is Outcome.FAILS
    assert "model.device is cpu" in check.sentence
