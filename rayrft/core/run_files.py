"""What a run's folder tells, while it is running and after its end, without a cluster."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayrft.buffer.reader import Archive
from rayrft.config import load_folder_config
from rayrft.core.checkpoints import find_folder
from rayrft.errors import RayrftError
from rayrft.experience import ExperienceGroup
from rayrft.markup import element, facts, line_chart
from rayrft.monitor.records import RolloutRecord, StepRecord, flat, read_records
from rayrft.monitor.summary import RunStatus, read_summary, status_at_end, summarise_from_folder

if TYPE_CHECKING:
    import pandas as pd

    from rayrft.core.services import OpenService
    from rayrft.monitor.plot import RunPlot


class RunFiles:
    """The files of a run, which may have been moved here from another cluster."""

    def __init__(self, folder: Path, name: str = "") -> None:
        self.folder = folder
        self.name = name or folder.name

    def status(self) -> RunStatus:
        """Return status, step, version and ledger as the files have them."""
        unknown = "it left no summary: it was killed, or is running on another cluster"
        summary = read_summary(self.folder) or summarise_from_folder(self.folder, "killed", unknown)
        return status_at_end(summary, self.folder)

    def metrics(self) -> pd.DataFrame:
        """Return one row per optimiser step so far."""
        return self._frame("step")

    def evaluations(self) -> pd.DataFrame:
        """Return one row per evaluation so far."""
        return self._frame("evaluation")

    def _frame(self, kind: str) -> pd.DataFrame:
        import pandas as pd

        return pd.DataFrame([flat(record) for record in read_records(self.folder) if record.kind == kind])

    def plot(self) -> RunPlot:
        """Return a figure of reward, accuracy and seconds by step so far."""
        from rayrft.monitor.plot import RunPlot

        return RunPlot(read_records(self.folder), self.name)

    def group(self, row_id: str) -> ExperienceGroup:
        """Return the usual rows of the group that has this id, or a row with it, or the demonstration of this id, from
        the log. Raises DataError if there is none."""
        from rayrft.data.tokenizer import ChatTokenizer

        rows, model = Archive.of_run(self.folder).group(row_id), load_folder_config(self.folder).model
        text_of: Callable[[int], str] | None = None
        with contextlib.suppress(RayrftError):  # it is not on this machine
            text_of = ChatTokenizer(self.folder / "model" if model.tiny is not None else str(model.path)).hf.decode
        return ExperienceGroup(rows[0].group_id, tuple(rows), text_of)

    def serve_feedback(self, **settings: Any) -> OpenService:
        """Serve a page where people judge and edit the run's answers, also after its end, until `OpenService.stop` or
        the end of this process; ``settings`` are those of `FeedbackConfig`."""
        from rayrft.config import read_config
        from rayrft.config.serve import FeedbackConfig
        from rayrft.core.services import serve_feedback

        return serve_feedback(self.folder, read_config(FeedbackConfig, {}, settings))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} in {self.folder}>"

    def _repr_html_(self) -> str:
        records = read_records(self.folder)
        rewards = [r.reward for r in records if isinstance(r, StepRecord | RolloutRecord) if r.reward is not None]
        stage = next((record.stage for record in reversed(records) if record.stage), "")
        view = element("code", f"rayrft view {shlex.quote(str(self.folder))}")
        summary = read_summary(self.folder)
        status = self.status() if summary is None else status_at_end(summary, self.folder)
        return facts({**vars(status), "stage": stage, "reward": line_chart(rewards), "rows and curves": view})


def read_run(run: str | Path) -> RunFiles:
    """Return the files of a run that is running or has ended, given as a folder or as a name in ``runs/``. Raises
    RunNotFound."""
    return RunFiles(find_folder(str(run)).absolute())
