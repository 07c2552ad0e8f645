"""The experiences of a run under way, through its handle."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayrft.core.placement import NAMESPACE, actor_name
from rayrft.errors import ConfigError, RunNotFound

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa
    import ray.data

    from rayrft.buffer.experience import Experience


class RunData:
    """The part of a `Run` that is about its Buffer. Every method raises RunNotFound once the run has ended."""

    name: str
    folder: Path

    def dataset(
        self, store: str = "usual", *, columns: Sequence[str] | None = None, where: Any = None
    ) -> ray.data.Dataset:
        """The experiences that a store (``usual`` or ``expert/<name>``) holds now: see `rayrft.buffer.dataset`."""
        from rayrft.buffer.dataset import dataset

        return dataset(self._buffer(), store, columns=columns, where=where)

    def experiences(self, n: int = 10) -> pd.DataFrame:
        """The newest of the own rows that are held: id, reward, question, answer, labels and weight versions."""
        import pandas as pd

        from rayrft.buffer.dataset import newest
        from rayrft.buffer.exchange import GLANCE, glance

        return pd.DataFrame([glance(row) for row in newest(self._buffer(), n)], columns=GLANCE)

    def feedback(self, experience_id: str, reward: float | None = None, labels: dict[str, str] | None = None) -> None:
        """Change the reward and labels of a row before it is trained; see `Buffer.feedback` for the errors."""
        from rayrft.buffer.dataset import answer

        answer(self._buffer().feedback.remote(experience_id, reward, labels))

    def load(self, rows: ray.data.Dataset | pa.Table | list[Experience], name: str) -> int:
        """Make rows the demonstrations ``name``, in place of what was there; gives their number. Own rows become expert
        rows. Raises DataError when a column is missing or a row is faulty."""
        from rayrft.buffer.dataset import load_dataset

        return load_dataset(self._buffer(), rows, name)

    def put(self, rows: list[Experience]) -> None:
        """Hand in whole groups of own rows, to a run in mode ``train``; returns when they are in its log.

        Advantages that are missing are computed from the rewards of their group, by the algorithm of the first stage
        that takes groups. Groups that were put before are passed over. Raises DataError when rows are faulty, with what
        was refused and why; see `rayrft.buffer.filling.put_groups`.
        """
        from rayrft.buffer.filling import put_groups
        from rayrft.config import load_config

        config = load_config(self.folder / "config.yaml")
        if config.mode != "train":
            raise ConfigError(
                "the run takes groups from its own explorer", field="mode", value=config.mode, remedy="use mode: train"
            )
        stages = [stage for stage in config.stages if stage.groups]
        if not stages:
            raise ConfigError(
                "no stage of the run takes groups",
                field="stages",
                value=self.name,
                remedy="give a stage an algorithm that trains on own rows",
            )
        algorithm, group_size = stages[0].algorithm.build(), stages[0].group_size
        put_groups(self._buffer(), config.buffer.shards, rows, algorithm, group_size)

    def finish(self) -> None:
        """Say that no more groups will be put: a step that cannot be filled ends the run's stage."""
        from rayrft.buffer.dataset import answer

        answer(self._buffer().detach.remote("put"))

    def _buffer(self) -> Any:
        import ray

        try:
            if not (self.folder / "summary.json").exists():  # at its end a run takes its actors down, one by one
                return ray.get_actor(actor_name(self.name, "buffer"), namespace=NAMESPACE)
        except ValueError:
            pass
        raise RunNotFound(
            "the run is not under way, and its Buffer is gone",
            field="name",
            value=self.name,
            remedy=f"look at what is left with: rayrft data head {self.folder}",
        )
