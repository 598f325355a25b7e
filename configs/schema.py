"""The settings of one deployment: names, types, defaults and the rules among them.

Owns every rule that needs no facts about a model; rules that need them (does the pool hold the
window?) are in `workers.checks`. Values are frozen and never read from the environment here:
`configs.load` does that, once per process.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    model_validator,
)

from configs.addresses import is_loopback

__all__ = [
    "ChannelSettings",
    "DecodeSettings",
    "EngineSettings",
    "HttpSettings",
    "KVSettings",
    "LimitSettings",
    "ModelSettings",
    "PrefillSettings",
    "RouterSettings",
    "Settings",
    "TlsSettings",
    "TransferSettings",
]

_BYTE_UNITS = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}


def _parse_bytes(value: object) -> object:
    """Turn "2GiB" into a number of bytes; anything but text is left to the type check."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]+)", value.strip())
    unit = _BYTE_UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ValueError(
            f"must be a number of bytes or a size such as 512MiB or 2GiB, but is {value!r}"
        )
    return int(float(match[1]) * unit)


def _check_can_be_dialled(host: str) -> str:
    """Refuse what means every address: peers are told of the host, and would dial themselves."""
    try:
        is_unspecified = ipaddress.ip_address(host).is_unspecified
    except ValueError:  # a name
        is_unspecified = False
    if is_unspecified:
        raise ValueError(
            f"is {host}, every address of the host: a worker listens where its peers are told to "
            "find it, so give the one address by which they reach this host (127.0.0.1 on one "
            "host; a pod is given its own by its manifest)"
        )
    return host


Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
ByteCount = Annotated[int, Field(ge=1), BeforeValidator(_parse_bytes)]
Name = Annotated[str, Field(min_length=1)]
PeerHost = Annotated[Name, AfterValidator(_check_can_be_dialled)]
"""Where workers listen, and where their peers look for them."""


class _Group(BaseModel):
    """A group of settings: frozen, strictly typed, no unknown names."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True
    )


class ModelSettings(_Group):
    """Which model is served, and in which form."""

    source: Name = "smollm2-135m"
    """A name that `baton models list` knows, a directory, or a hub id."""
    name: Name | None = None
    """What clients call the model; null takes the last part of source."""
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Of weights and KV; auto is bf16 on a GPU and on a CPU with AMX, else fp32."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where weights and KV lie; each worker has its own GPU, or its share of one."""
    max_model_len: Count | None = None
    """The window in tokens, prompt and output together; null is the model's own."""

    @property
    def served_name(self) -> str:
        """The name in the HTTP API."""
        return self.name or self.source.rstrip("/").rsplit("/", 1)[-1] or self.source


class KVSettings(_Group):
    """The KV cache's shape."""

    block_size: Count = 16
    """Tokens in a block of every worker, unless prefill.block_size says another number."""
    prefix_cache: bool = True
    """Whether KV is kept after its request and found by prompts that begin alike."""


class EngineSettings(_Group):
    """One worker's engine: its pool and how much a step may do."""

    pool_tokens: Count | None = None
    """Tokens that the pool holds at least; not together with pool_bytes."""
    pool_bytes: ByteCount | None = None
    """Bytes that the pool takes at most, e.g. 2GiB; with neither, the window decides."""
    max_sequences: Count = 64
    """Sequences that run in one step at most."""
    step_tokens: Count = 1024
    """Tokens that one step computes at most."""
    prefill_chunk_tokens: Count = 256
    """Prompt tokens of one sequence in one step at most."""
    step_target_s: Seconds | None = 0.7
    """A step takes no more prompt tokens than fit this time, as measured, but 64 at least: what a
    request held is free when its step is over. null: as many as the two above allow."""
    threads: Count | None = None
    """Of the forward pass; null: those cores of the host that other workers do not compute on."""
    gpu_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Of a GPU, booked for each worker where model.device is cuda; below 1 workers share one."""
    queue_limit: Count = 256
    """Requests that may wait for blocks; one more is refused with 429."""

    @model_validator(mode="after")
    def _check_pool_is_sized_once(self) -> Self:
        if self.pool_tokens is not None and self.pool_bytes is not None:
            raise ValueError(
                f"pool_tokens ({self.pool_tokens}) and pool_bytes ({self.pool_bytes}) both size "
                "the pool; give at most one of them"
            )
        return self

    @model_validator(mode="after")
    def _check_step_holds_its_parts(self) -> Self:
        if self.step_tokens < self.max_sequences:
            raise ValueError(
                f"step_tokens ({self.step_tokens}) must be at least max_sequences "
                f"({self.max_sequences}), or not every sequence gets its token in a step"
            )
        if self.prefill_chunk_tokens > self.step_tokens:
            raise ValueError(
                f"prefill_chunk_tokens ({self.prefill_chunk_tokens}) must be at most step_tokens "
                f"({self.step_tokens}), or no step can run a whole chunk"
            )
        return self


class DecodeSettings(_Group):
    """The decode pool; it prefills everything itself where there is no prefill pool."""

    replicas: Count = 1
    engine: EngineSettings = EngineSettings()
    local_prefill_tokens: Annotated[int, Field(ge=0)] = 128
    """Prompts up to this long are prefilled on decode: a hand-off would cost more than it saves."""
    placement: Literal["remote", "cost"] = "remote"
    """Longer ones: remote hands all of them over, cost those that measure cheaper so."""
    gap_target_s: Seconds | None = 0.15
    """While streams run, a step takes no more prompt tokens than fit this time, as measured; null:
    as many as the engine's limits allow."""
    gather_s: Annotated[float, Field(ge=0, le=1)] = 0.01
    """An idle worker begins when no further prompt has come for so long, or when it has waited a
    tenth of the time that those which are there will take, as measured. So one step computes
    those that come together; 0: with the first one."""
    silence_s: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 2.0
    """A decode worker that gives no sign of life for so long loses its requests to another one."""


class PrefillSettings(_Group):
    """The prefill pool."""

    replicas: Count = 1
    engine: EngineSettings = EngineSettings()
    block_size: Count | None = None
    """Tokens in a block of prefill workers; null is kv.block_size. Of another size, decode workers
    put what they fetch into blocks of theirs."""


class TlsSettings(_Group):
    """Certificates of the workers for KV over TCP: PEM files, on each host at the same path."""

    certificate: Name
    """This worker's certificate, the chain to `ca` behind it if there is one."""
    key: Name
    """Its private key."""
    ca: Name
    """The authority that has signed every worker's certificate, and nothing beyond them."""


class TransferSettings(_Group):
    """How KV moves from prefill to decode."""

    transport: Literal["auto", "shm", "tcp", "nixl", "torch", "cuda_ipc"] = "auto"
    """auto is shm (shared memory) between workers of one host, where it allows that; else nixl,
    where host is an RDMA device's address and the extra rdma is installed; else tcp.

    torch moves blocks over process groups of torch.distributed (Gloo). Of pools on GPUs auto is
    cuda_ipc on one GPU, torch (NCCL) between two, else tcp; none of that was run so far.
    """
    host: PeerHost = "127.0.0.1"
    """Address that prefill workers listen on for decode workers; with torch both sides do. NCCL
    gets its interface, unless NCCL_SOCKET_IFNAME in a worker's environment names another."""
    ucx_device: Name | None = None
    """The device that nixl uses, as UCX calls it (mlx5_0:1, eth0); null is the one with host."""
    tls: TlsSettings | None = None
    """Encrypts what moves over tcp; null is plain, where whoever is on the wire can read KV."""
    lease_s: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 5.0
    """How long prefill keeps blocks for a decode worker that it hears nothing of."""
    deadline_s: Seconds = 300.0
    """How long one transfer may take in all, the prompt's computation included."""

    @model_validator(mode="after")
    def _check_tls_has_a_use(self) -> Self:
        if self.tls is not None and self.transport not in ("auto", "tcp"):
            raise ValueError(
                f"tls encrypts what moves over tcp, but transport is {self.transport}: leave one "
                "of the two out"
            )
        return self

    @model_validator(mode="after")
    def _check_lease_is_shorter(self) -> Self:
        if self.lease_s >= self.deadline_s:
            raise ValueError(
                f"lease_s ({self.lease_s:g}) must be below deadline_s ({self.deadline_s:g}): a "
                "lease is renewed several times in a transfer"
            )
        return self


class ChannelSettings(_Group):
    """The token channel, on which Front sends requests to decode workers and gets tokens."""

    host: PeerHost = "127.0.0.1"
    """Address that decode workers listen on for Fronts."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """0 lets the system choose; another one is for a single decode worker on each address."""


class HttpSettings(_Group):
    """The HTTP entry."""

    host: Name = "127.0.0.1"
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    keep_alive_s: Seconds = 10.0
    """A stream that has nothing to send for this long sends a comment line."""
    request_timeout_s: Seconds = 600.0
    max_body_bytes: ByteCount = 8 * 2**20
    front_replicas: Count = 1

    @model_validator(mode="after")
    def _check_keep_alive_comes_first(self) -> Self:
        if self.keep_alive_s >= self.request_timeout_s:
            raise ValueError(
                f"keep_alive_s ({self.keep_alive_s:g}) must be below request_timeout_s "
                f"({self.request_timeout_s:g})"
            )
        return self


class LimitSettings(_Group):
    """What one request may ask for."""

    default_max_tokens: Count = 1024
    """Output tokens of a request that names none; less where the window has less room."""
    max_choices: Annotated[int, Field(ge=1, le=128)] = 16
    """The largest n."""


class RouterSettings(_Group):
    """How an agent step finds its model pool."""

    policy: Literal["fixed"] = "fixed"


class Settings(_Group):
    """Everything that `baton serve` needs to know."""

    model: ModelSettings = ModelSettings()
    kv: KVSettings = KVSettings()
    decode: DecodeSettings = DecodeSettings()
    prefill: PrefillSettings | None = None
    """null is colocated: decode workers prefill everything themselves."""
    transfer: TransferSettings = TransferSettings()
    channel: ChannelSettings = ChannelSettings()
    http: HttpSettings = HttpSettings()
    limits: LimitSettings = LimitSettings()
    router: RouterSettings = RouterSettings()

    @model_validator(mode="after")
    def _check_channel_ports_suffice(self) -> Self:
        if self.channel.port and self.decode.replicas > 1 and is_loopback(self.channel.host):
            raise ValueError(
                f"channel.port ({self.channel.port}) is one port for {self.decode.replicas} decode "
                "workers on this host; 0 lets each have its own"
            )
        return self
