"""Builds a worker's parts from its settings: the model as it is on disk, and an engine for it.

Imported only by a process that will compute, because torch comes with it. Nothing heavy is loaded
yet: weights and cache are allocated when the first plan says how many slots there are.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from tokenizers import Tokenizer

from moe_kernels import implementation, invariance
from moe_kernels.implementation import ImplementationUnavailable, UnknownImplementation
from moe_kernels.kv_formats import KvFormatError
from moe_worker.api.served_model import ServedModel
from moe_worker.engine.engine import Engine
from moe_worker.engine.kv_scales import KvScalesUnusable
from moe_worker.engine.settings import EngineSettings
from moe_worker.failed_engine import FailedEngine
from moe_worker.metrics import WorkerMetrics
from moe_worker.model.config import (
    ModelHasNoExperts,
    ModelSpec,
    ModelUnreadable,
    load_architecture,
)
from moe_worker.model.weights import Checkpoint
from moe_worker.serve import ServeSettings
from moe_worker.serving_engine import ServingEngine
from moe_worker.text.chat_template import TemplateUnreadable, load_template
from moe_worker.text.grammar import Grammars, TokenizerUnguidable
from moe_worker.text.prompt_tokenizer import PromptTokenizer, TokenizerUnreadable, load_tokenizer
from moe_worker.text.stop_tokens import stop_token_ids

logger = logging.getLogger(__name__)


def assemble(
    settings: ServeSettings, metrics: WorkerMetrics
) -> tuple[ServingEngine, ServedModel | None]:
    """The engine, and what the public API needs of the model; None when it can not be served."""
    torch.set_num_threads(settings.threads)
    config = settings.config
    try:
        metrics.kernels(implementation.select(config.kernels, config.device))
    except (ImplementationUnavailable, UnknownImplementation) as error:
        return _failed(settings, "KernelsUnavailable", str(error)), None
    invariance.require(config.batch_invariant)
    path = Path(config.model.path)
    try:
        arch = load_architecture(path).held_in(config.model.dtype)
        checkpoint = Checkpoint(path, arch)
        model = _served_model(config.model.served_name, path, arch)
    except (ModelUnreadable, ModelHasNoExperts) as error:
        return _failed(settings, error.reason, str(error)), None
    except (TokenizerUnreadable, TemplateUnreadable) as error:
        return _failed(settings, ModelUnreadable.reason, str(error)), None
    engine_settings = EngineSettings(
        config=config,
        member=settings.identity.member,
        incarnation=settings.identity.incarnation,
        token=settings.token,
        control_port=settings.control_port,
    )
    try:
        return Engine(engine_settings, arch, checkpoint, metrics), model
    except (KvFormatError, KvScalesUnusable) as error:
        return _failed(settings, "KvCacheUnusable", str(error)), None


def _served_model(name: str, path: Path, arch: ModelSpec) -> ServedModel:
    tokenizer = load_tokenizer(path)
    stops = stop_token_ids(path, arch.eos_token_ids, tokenizer)
    return ServedModel(
        name=name,
        tokenizer=PromptTokenizer(tokenizer),
        template=load_template(path),
        vocab_size=arch.vocab_size,
        stop_token_ids=stops,
        grammars=_grammars(tokenizer, arch.vocab_size, stops),
    )


def _grammars(tokenizer: Tokenizer, vocab_size: int, stops: frozenset[int]) -> Grammars | None:
    try:
        return Grammars(tokenizer, vocab_size, stops)
    except TokenizerUnguidable as error:
        logger.warning("answers can not be held to a schema: %s", error)
        return None


def _failed(settings: ServeSettings, reason: str, message: str) -> FailedEngine:
    logger.error("the model can not be served: %s", message, extra={"reason": reason})
    identity = settings.identity
    return FailedEngine(identity.incarnation, identity.member, reason, message)
