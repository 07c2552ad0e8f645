"""What reaches wandb, from the file that it writes offline."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import wandb
from wandb.proto.wandb_internal_pb2 import Record

from rayrft.monitor.sinks import Wandb
from tests.core.given import run_folder
from tests.monitor.made import evaluation, step

_BLOCK, _WHOLE, _LAST = 1 << 15, 1, 4
"""Of LevelDB's log: size of a block, and the types of chunks that end a record."""


def records(file: Path) -> Iterator[Record]:
    data, at, record = file.read_bytes(), 7, b""
    while at < len(data):
        if (left := _BLOCK - at % _BLOCK) < 7:
            at += left  # no header fits
            continue
        length, kind = struct.unpack_from("<xxxxHB", data, at)
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (_WHOLE, _LAST):
            yield Record.FromString(record)
            record = b""


def test_an_evaluation_that_ends_after_later_steps_arrives_and_a_resumed_run_is_the_same_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = run_folder(tmp_path, "run")
    sink = Wandb(config)
    for record in (step(step=1), step(step=5), evaluation("mix", 2, 50, step=2), step(step=6)):
        sink.write(record)
    sink.close()
    wandb.teardown()  # its process writes the rest of the file
    [file] = config.folder.glob("wandb/offline-run-*/*.wandb")
    logged = [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in records(file)
        if record.HasField("history")
    ]
    assert [each["train/step"] for each in logged if "train/step" in each] == [1, 5, 6]
    assert [(each["eval/step"], each["eval/accuracy_t0"]) for each in logged if "eval/step" in each] == [(2, 0.5)]
    axes = {record.metric.glob_name: record.metric.step_metric for record in records(file) if record.HasField("metric")}
    assert axes["eval/*"] == "eval/step" and axes["train/*"] == "train/step"

    asked: dict[str, Any] = {}
    monkeypatch.setattr(wandb, "init", lambda **settings: asked.update(settings) or Wandb.__new__(Wandb))
    monkeypatch.setattr(Wandb, "define_metric", lambda *_, **__: None, raising=False)
    Wandb(config)
    assert asked["id"] == file.stem.removeprefix("run-") and asked["resume"] == "allow"
