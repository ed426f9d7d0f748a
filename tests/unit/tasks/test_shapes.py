"""A decoder's layout comes from its shapes, without its numbers."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.config import load
from atoll.tasks.task import language_task, layout_for


@pytest.mark.parametrize("numbers", [{}, {"tied": True}, {"experts": 4}])
def test_layout_of_shapes_is_that_of_the_model(numbers: dict[str, Any]) -> None:
    config = load(preset_name="decoupled", overrides={"model": {"numbers": numbers}, "data": {"max_bytes": 200_000}})
    task = language_task(config)
    model = task.build()
    assert task.layout == layout_for(config, model)
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())), "the model itself has its numbers"
