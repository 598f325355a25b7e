"""The model that is served, as Front must know it: tokenizer, chat template and facts."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from configs.schema import Settings
from deployments.front_service import ServedModel
from deployments.openai.models import ModelCard, SamplingDefaults
from deployments.text.chat import ChatEncoder
from deployments.text.tokenizer import TextTokenizer
from workers.host import is_faster_in_bf16
from workers.models.facts import read_facts
from workers.models.generation_config import read_eos_token_ids, read_generation_defaults
from workers.models.store import ModelStore, default_cache_dir
from workers.runner_choice import choose_runner

__all__ = ["read_served_model"]

_TOKENIZER_THREADS = 2


def read_served_model(settings: Settings, environ: Mapping[str, str]) -> ServedModel:
    """Read it from the model's files; its weights are the workers' business.

    Raises `ModelError` where there is no such model.
    """
    cache_dir = default_cache_dir(environ)
    path = ModelStore(cache_dir).resolve(settings.model.source).path
    facts = read_facts(path, settings.model, is_faster_in_bf16=is_faster_in_bf16())
    defaults = read_generation_defaults(path)
    executor = ThreadPoolExecutor(_TOKENIZER_THREADS, thread_name_prefix="tokenizer")
    window = settings.model.max_model_len or facts.context_length
    return ServedModel(
        card=ModelCard(
            name=settings.model.served_name,
            window=window,
            vocab_size=facts.vocab_size,
            eos_token_ids=frozenset(read_eos_token_ids(path)),
            default_max_tokens=settings.limits.default_max_tokens,
            defaults=SamplingDefaults(
                temperature=defaults.temperature,
                top_p=defaults.top_p,
                top_k=defaults.top_k,
                min_p=defaults.min_p,
                repetition_penalty=defaults.repetition_penalty,
            ),
            created=int(time.time()),
            runner=choose_runner(facts.architecture, window=window),
        ),
        codec=TextTokenizer.from_directory(path, executor),
        chat=ChatEncoder.from_directory(path),
    )
