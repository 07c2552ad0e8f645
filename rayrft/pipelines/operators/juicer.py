"""Operators of Data-Juicer (Chen et al. 2023, arXiv:2309.02033) by their names, in an interpreter that has it.

Data-Juicer pins packages that rayrft needs in other versions, and installs more as it runs. So it is in an environment
of its own: one that is named, or a runtime environment of Ray. From there a process (`juicer_worker`) takes and gives
Arrow batches.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pydantic import ConfigDict, Field

from rayrft.config.base import Section
from rayrft.errors import ConfigError, OperatorFailed
from rayrft.pipelines.operator import Applied, Context, Operator, Wants, register_operator, with_column
from rayrft.pipelines.operators import juicer_worker
from rayrft.pipelines.rows import gone
from rayrft.pipelines.run.host import packed
from rayrft.runtime.ray_api import ray

log = logging.getLogger(__name__)
PYTHON = "RAYRFT_JUICER_PYTHON"
"""The environment variable with the path of the interpreter."""
PACKAGES = ["py-data-juicer==1.6.1", "aiohttp"]
"""It needs aiohttp, and Ray, which is there, and asks for neither."""
_MADE_WITHIN_S = 900.0
_REMEDY = (
    f"make an environment (python -m venv juicer; juicer/bin/pip install {' '.join(PACKAGES)} ray), and give its "
    f"interpreter: juicer_python, or {PYTHON}"
)
_held: list[Any] = []
"""Actors in Ray's runtime environments, which stay as long as these."""


class JuicerOptions(Section):
    """Options of `Juicer`. Other options are passed to Data-Juicer's operator."""

    model_config = ConfigDict(extra="allow", frozen=True, validate_default=True)

    juicer: str
    """The name of Data-Juicer's operator, such as ``clean_links_mapper``."""
    column: str = "question"
    """The texts it works on."""
    columns: list[str] = Field(default_factory=list)
    """Further columns that it reads or changes."""
    makes_rows: bool = False
    """Whether it may make several rows of one; then these are added, and the row itself is left out."""
    juicer_python: Path | None = None
    """The interpreter; by default that in RAYRFT_JUICER_PYTHON, or this one, if it has Data-Juicer, or that of a
    runtime environment that Ray makes."""


@register_operator("juicer")
class Juicer(Operator[JuicerOptions]):
    """An operator of Data-Juicer: mappers change texts, or make rows of one; filters, deduplicators and selectors leave
    rows out. Of its groupers and aggregators nothing can be made here. Deduplicators and selectors hold the columns of
    all rows in memory, twice."""

    kind = "clean"

    def __init__(self, options: JuicerOptions, context: Context) -> None:
        super().__init__(options, context)
        name = options.juicer
        if name.endswith(("_grouper", "_aggregator", "_pipeline")):
            raise ConfigError("gives other rows than it takes, which no operator here may", field="juicer", value=name)
        self.kind = "synthesise" if options.makes_rows else "clean"  # type: ignore[misc,assignment]
        self.scope = "all" if name.endswith(("_deduplicator", "_selector")) else "row"  # type: ignore[misc]
        self.version = name  # type: ignore[misc]
        self._names = list(dict.fromkeys([options.column, *options.columns]))
        self._python = _interpreter(options.juicer_python)
        self._seen: list[pa.RecordBatch] = []

    @property
    def reads(self) -> Mapping[str, Wants]:
        return {**dict.fromkeys(self._names, "any"), self.options.column: "text"}

    def prepare(self) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  it is open as long as the process
        # Isolated: neither this folder, whose modules have names of the standard library's, nor PYTHONPATH is for it.
        command = [self._python, "-I", juicer_worker.__file__]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self._log)
        given = {"text_key": self.options.column, **(self.options.model_extra or {})}
        self._ask({"do": "start", "op": self.options.juicer, "options": given})

    def observe(self, rows: pa.RecordBatch) -> None:
        self._seen.append(rows.select(self._names))

    def settle(self) -> None:
        self._kept = np.zeros(sum(map(len, self._seen)), bool)
        if self._seen:
            self._kept[self._applied(self._seen).column(juicer_worker.ROW).to_numpy()] = True
        self._seen.clear()

    def apply(self, rows: pa.RecordBatch) -> Applied:
        out = f"{self.options.juicer} leaves it out"
        if self.scope == "all":
            return Applied(rows, gone(out, self.take_next(self._kept, rows)))
        found = self._applied([rows.select(self._names)])
        indices = found.column(juicer_worker.ROW).to_numpy()
        counts = np.bincount(indices, minlength=rows.num_rows)
        if counts.max(initial=0) > 1 and not self.options.makes_rows:
            problem = f"{self.options.juicer} makes {counts.max()} rows of one"
            raise OperatorFailed(problem, "set makes_rows: true", field="juicer")
        first = np.zeros(rows.num_rows, np.int64)
        first[indices[::-1]] = np.arange(len(indices))[::-1]
        single = np.flatnonzero(counts == 1)
        reasons = [None if count == 1 else out if not count else "several rows are made of it" for count in counts]
        split = np.flatnonzero(counts[indices] > 1)
        made = self._with(rows.take(pa.array(indices[split])), found.take(split)) if len(split) else None
        changed, back = rows, np.arange(rows.num_rows)
        if len(single):
            before = pa.Table.from_batches([rows.select(self._names)])
            back[single] = rows.num_rows + first[single]
            merged = pa.concat_tables([before, found.select(self._names).cast(before.schema)])
            changed = self._with(rows, merged.take(back))
        return Applied(changed, reasons, made, [(int(index),) for index in indices[split]])

    def _with(self, rows: pa.RecordBatch, values: pa.Table) -> pa.RecordBatch:
        for name in self._names:
            rows = with_column(rows, name, values.column(name).combine_chunks().cast(rows.schema.field(name).type))
        return rows

    def _applied(self, batches: Sequence[pa.RecordBatch]) -> pa.Table:
        table = pa.Table.from_batches(batches)
        numbered = table.append_column(juicer_worker.ROW, pa.array(np.arange(table.num_rows)))
        with pa.ipc.open_stream(self._ask({"do": "apply"}, packed(numbered))) as stream:
            return stream.read_all()

    def _ask(self, request: dict[str, Any], body: bytes = b"") -> bytes:
        """Return the body of a request's reply. Raises OperatorFailed if the operator raised, or its process ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({**request, "size": len(body)}).encode() + b"\n" + body)
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = b""
        if not line:
            code = self._process.wait()
            self._log.seek(0)
            said = self._log.read().decode(errors="replace").strip().splitlines()[-1:] or ["nothing"]
            problem = f"its interpreter ended with code {code}, and said: {said[0][:500]}"
            raise OperatorFailed(problem, _REMEDY, field="juicer", value=self._python)
        reply = json.loads(line)
        if "error" in reply:
            raise OperatorFailed(reply["error"], field="juicer", value=self.options.juicer)
        return self._process.stdout.read(reply["size"])


def _interpreter(given: Path | None) -> str:
    named = given or (Path(os.environ[PYTHON]) if os.environ.get(PYTHON) else None)
    if named is None:
        return sys.executable if importlib.util.find_spec("data_juicer") is not None else _of_ray()
    if not os.access(named, os.X_OK) or not named.is_file():
        raise ConfigError("there is no such interpreter", _REMEDY, field="juicer_python", value=str(named))
    return str(named.absolute())  # not resolved: an environment's interpreter is a link


def _of_ray() -> str:
    """Have Ray make a runtime environment with Data-Juicer on this node, and return its interpreter, for this process
    and those that it starts. Raises ConfigError if it cannot, or is not there."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    if not ray.is_initialized():
        raise ConfigError("Data-Juicer is not installed here", _REMEDY, field="juicer")
    log.warning("Ray makes an environment with Data-Juicer: a minute or two, unless there is one on this node")
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor = ray.remote(_Inside).options(num_cpus=0, runtime_env={"pip": PACKAGES}, scheduling_strategy=here).remote()
    try:
        os.environ[PYTHON] = python = ray.get(actor.python.remote(), timeout=_MADE_WITHIN_S)
    except ray.exceptions.RayError as error:
        problem = f"Ray cannot make an environment with Data-Juicer: {str(error).strip().splitlines()[-1]}"
        raise ConfigError(problem, _REMEDY, field="juicer") from error
    _held.append(actor)
    return str(python)


class _Inside:
    """An actor that keeps the environment that it is in."""

    def python(self) -> str:
        return sys.executable
