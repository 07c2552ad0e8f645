"""What a job that explores or trains at a named Buffer may be configured with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rayrft.config import load_config
from rayrft.core.parts.table import plan_placement
from rayrft.errors import ConfigError
from tests.config.given import GRPO, base
from tests.errors import about

EXPLORE = {"mode": "explore", "buffer.name": "lake"}


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        ({"mode": "explore"}, "buffer.name"),
        ({"buffer.name": "lake"}, "buffer.name"),
        ({"buffer.max_age": 3}, "buffer.max_age"),
        ({**EXPLORE, "explorer.partial": {"budget": 5}}, "explorer.partial"),
        ({**EXPLORE, "stages": [GRPO, {**GRPO, "name": "second"}]}, "stages"),
        ({**EXPLORE, "stages": [{**GRPO, "evaluate_every": 1}]}, "stages.grpo.evaluate_every"),
        ({"auxiliary.judge": {"model": "some/model", "engine": {"count": 0}}}, "auxiliary.judge.engine.count"),
    ],
)
def test_what_cannot_be_is_said_before_anything_starts(overrides: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, check=about(field)):
        load_config({**base(), "stages": [GRPO]}, overrides)


@pytest.mark.parametrize(
    ("mode", "parts"),
    [
        ("explore", {"master", "explorer", "engines", "engine_pool"}),
        ("train", {"master", "trainer", "ranks"}),
    ],
)
def test_two_jobs_share_one_config_and_neither_places_the_buffer(mode: str, parts: set[str], tmp_path: Path) -> None:
    config = load_config({**base(), "stages": [GRPO]}, {**EXPLORE, "mode": mode, "storage": str(tmp_path)})
    assert {part.name for part in plan_placement(config)} == parts
    assert config.buffer_folder == tmp_path / "buffer.lake", "a name that no run can have"


def test_every_explorer_has_its_reward_actors_if_they_are_asked_for() -> None:
    beside = {"explorer.count": 3, "reward.name": "math", "reward.workers": 2}
    for changes, actors in ((beside, None), ({**beside, "reward.placement": "pool", "reward.actors": 2}, 6)):
        parts = {part.name: part.count for part in plan_placement(load_config(base(), changes))}
        assert (parts["explorer"], parts.get("reward")) == (3, actors)
