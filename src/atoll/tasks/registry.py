"""The task of a config: text by default; images, and questions about them, for vision models."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Final

from atoll.config import Config
from atoll.config.models import QUESTION_SOURCES
from atoll.errors import ConfigError
from atoll.tasks.task import Task, language_task
from atoll.tasks.vision import VISION_MODELS, vision_task
from atoll.workload.data.corpus import Progress
from atoll.workload.data.images import SOURCES, split_source

IMAGE_SOURCES: Final = frozenset((*SOURCES, *QUESTION_SOURCES))


def task_for(config: Config, allowed: Collection[str] = (), progress: Progress | None = None) -> Task:
    """`allowed`: the user's own code that may be imported, see `language_task`; `progress` reports long work."""
    if config.model.name in VISION_MODELS:
        return vision_task(config)
    corpus = config.data.corpus
    if split_source(corpus)[0] in IMAGE_SOURCES and not Path(corpus).exists():
        raise ConfigError(f"key data.corpus = {corpus!r}: holds images; model.name must be {', '.join(VISION_MODELS)}")
    return language_task(config, allowed, progress)
