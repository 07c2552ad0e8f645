"""Config of rows: where they are, for tasks, demonstrations and pipelines."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from rayrft.config.base import LocalPath, Section, invalid, section_rule

ORIGINS = {"path": "file", "dataset": "datasets", "read": "ray"}
"""Keys that say where rows are, with the task source that reads them."""


class RowSelection(Section):
    """Which rows are taken, and where their images are."""

    images: str = "images"
    """The column with a row's images, if any: paths, relative to the file's folder, or bytes."""
    images_folder: LocalPath | None = None
    """Folder for images that are given as bytes; every node must have it at this path."""
    size: int | None = Field(None, ge=1)
    """Number of rows to take, from the start; all by default."""
    on_broken: Literal["fail", "skip"] = "fail"
    """Whether an invalid row fails the start of the run, or is skipped and counted with its number."""


class RowsConfig(Section):
    """Where rows are: ``path``, ``dataset`` or ``read``."""

    path: LocalPath | None = None
    """A file or a folder of files (JSONL, JSON, CSV, TSV, Parquet, Arrow), or a data set saved by ``save_to_disk``."""
    dataset: str | None = None
    """The id of a data set on the Hugging Face hub, or a folder with a copy."""
    config: str | None = None
    """The data set's config (subset), if it has several."""
    revision: str | None = None
    """A branch, tag or commit of the data set; the newest by default."""
    split: str = "train"
    """The data set's split."""
    streaming: bool = False
    """Whether the data set's rows are read over the network as they are needed, instead of into the cache before."""
    read: str | None = None
    """A function of ``ray.data``, such as read_parquet, or ``package.module:function``, that gives a Ray Dataset."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of ``read``."""

    @property
    def origins(self) -> list[str]:
        """The keys that say where the rows are."""
        return [key for key in ORIGINS if getattr(self, key) is not None]

    @section_rule
    def _streams(self) -> None:
        if self.streaming and self.dataset is None:
            raise invalid("streaming", "is only valid with a data set", "remove it, or name the data set")
