"""Which task a config means: text by default, pictures and questions about them where the model has eyes."""

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

PICTURES: Final = frozenset((*SOURCES, *QUESTION_SOURCES))


def task_for(config: Config, allowed: Collection[str] = (), progress: Progress | None = None) -> Task:
    """`allowed`: code of the user's own that may be imported, see `language_workbench`; `progress` hears of long work."""
    if config.model.name in VISION_MODELS:
        return vision_task(config)
    corpus = config.data.corpus
    if split_source(corpus)[0] in PICTURES and not Path(corpus).exists():
        raise ConfigError(f"key data.corpus = {corpus!r}: holds pictures; model.name must be {', '.join(VISION_MODELS)}")
    return language_task(config, allowed, progress)
