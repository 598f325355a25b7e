"""What transformers' `generate` gives for a prompt: the oracle that every path is held against.

A reference is made alone, one prompt in one call, since a batch of transformers' own pads and
changes sums. It is computed once for a model, a prompt and the versions that compute it, and kept
in a folder, so that a second run costs nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
import xxhash

__all__ = ["Reference", "ReferenceCache", "make_reference", "model_digest"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """What `generate` gives for a prompt, greedily."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    gaps: tuple[float, ...]
    """By token: the likeliest logit less the second."""

    def cut(self, num_tokens: int) -> Reference:
        """Its first num_tokens tokens: greedy text does not depend on how much follows."""
        return Reference(
            prompt=self.prompt, tokens=self.tokens[:num_tokens], gaps=self.gaps[:num_tokens]
        )

    def continued(self, num_tokens: int) -> Reference:
        """The same text with its first num_tokens output tokens in the prompt, as a next turn."""
        return Reference(
            prompt=self.prompt + self.tokens[:num_tokens],
            tokens=self.tokens[num_tokens:],
            gaps=self.gaps[num_tokens:],
        )


def make_reference(model: torch.nn.Module, prompt: Sequence[int], num_tokens: int) -> Reference:
    """Ask a stock model, in its own attention implementation, for num_tokens tokens."""
    output = model.generate(  # type: ignore[operator]  # a transformers model
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    top = [logits[0].topk(2).values for logits in output.logits]
    return Reference(
        prompt=tuple(prompt),
        tokens=tuple(output.sequences[0, len(prompt) :].tolist()),
        gaps=tuple(float(first - second) for first, second in top),
    )


def model_digest(model: torch.nn.Module) -> str:
    """Of configuration and weights, buffers included; 32 hexadecimal digits."""
    digest = xxhash.xxh3_128(model.config.to_json_string(use_diff=False).encode())  # type: ignore[operator, union-attr]
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}".encode())
        digest.update(memoryview(tensor.contiguous().view(torch.uint8).numpy()).cast("B"))
    return digest.hexdigest()


class ReferenceCache:
    """References of one model in a folder; makes those that are not there."""

    def __init__(self, folder: Path, model: torch.nn.Module) -> None:
        self._model = model
        versions = f"torch-{torch.__version__}-transformers-{transformers.__version__}"
        # Sums differ between instruction sets, and with them a tie's winner.
        kernels = torch.backends.cpu.get_cpu_capability()
        self._folder = folder / f"{versions}-{kernels}" / model_digest(model)

    def get(self, prompt: Sequence[int], num_tokens: int) -> Reference:
        """The prompt's reference; must not be asked once the model's attention was replaced."""
        name = xxhash.xxh3_128_hexdigest(json.dumps(list(prompt)).encode())
        path = self._folder / f"{name}.json"
        kept = _read(path, prompt)
        if kept is None or len(kept.tokens) < num_tokens:
            kept = make_reference(self._model, prompt, num_tokens)
            _write(path, kept)
        return kept.cut(num_tokens)


def _read(path: Path, prompt: Sequence[int]) -> Reference | None:
    if not path.is_file():
        return None
    kept = json.loads(path.read_text())
    return Reference(prompt=tuple(prompt), tokens=tuple(kept["tokens"]), gaps=tuple(kept["gaps"]))


def _write(path: Path, reference: Reference) -> None:
    """Whole or not at all: a run may be stopped, or have a neighbour."""
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_suffix(f".{os.getpid()}")
    staged.write_text(json.dumps({"tokens": reference.tokens, "gaps": reference.gaps}))
    staged.replace(path)
