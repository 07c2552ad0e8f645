"""A small run that looks at pictures: demonstrations, episodes of several, an application that shows some; the eye is
trained as the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rayrft
from rayrft.buffer.reader import Archive
from rayrft.config import load_config
from rayrft.core.preflight import prepare
from rayrft.errors import ModelError
from rayrft.experience import from_batch
from rayrft.monitor.records import StepRecord, read_records
from tests.e2e.configs import vision_config


def test_a_model_learns_from_pictures_and_the_engine_computes_as_the_trainer_does(
    ray_cluster: Any, tmp_path: Path
) -> None:
    from transformers import AutoModelForImageTextToText, AutoProcessor

    run = rayrft.start(
        vision_config(tmp_path, "vision"),
        # Requests with images are under way while weights change, and every version is compared on held-out pictures.
        **{"max_staleness": 1, "weight_sync.probe_every": 1, "weight_sync.tolerance": 1e-4},
    )
    run.watch()
    summary = run.result()
    assert summary.status == "finished" and summary.steps == 5
    steps = [record for record in read_records(run.folder) if isinstance(record, StepRecord)]
    warmup, mix = steps[:3], steps[3:]
    assert warmup[-1].metrics.sft_loss < warmup[0].metrics.sft_loss
    assert all(step.usual_rows and step.expert_rows for step in mix)
    assert mix[0].metrics.logprob_gap < 1e-4
    assert all(step.probe_gap is not None and step.probe_gap < 1e-4 for step in mix)
    rows = [row for batch in Archive.of_run(run.folder).rows("usual") for row in from_batch(batch)]
    seen = [row for row in rows if row.images]
    assert 0 < len(seen) < len(rows), "rows with images and rows without were trained together"
    sent = [row for row in seen if row.images[0].startswith("data:image/png;base64,")]
    assert 0 < len(sent) < len(seen), "an application's pictures are in its rows, an environment's in files"
    assert {len(set(row.images)) for row in sent} <= {1, 2} and any(len(row.images) == 2 for row in sent)
    seen = [row for row in seen if not row.images[0].startswith("data:")]
    assert {Path(path).parent for row in seen for path in row.images} == {run.folder / "images"}
    # An answer with the token of an image, as an untrained model gives at times, is the last one.
    assert all(row.stop_reason == "length" for row in seen if len(row.images) < 2)
    whole = [row for row in seen if len(row.images) == 2]
    turns = [np.flatnonzero(np.diff(row.action_mask.astype(int)) == 1).size for row in whole]
    assert turns == [2] * len(whole) and len(whole) > len(seen) / 2, "two answers, between which a picture stands"

    start, end = (AutoModelForImageTextToText.from_pretrained(run.folder / f) for f in ("model", "checkpoints/final"))
    for part in ("visual", "language_model"):
        pairs = zip(*(getattr(model.model, part).parameters() for model in (start, end)), strict=True)
        assert any(not old.equal(new) for old, new in pairs), part
    image = AutoProcessor.from_pretrained(run.folder / "checkpoints" / "final").image_processor
    assert image.patch_size == 8


def test_tasks_with_images_need_a_model_that_takes_them(tmp_path: Path, ray_cluster: Any) -> None:
    text = {"tiny": {"layers": 2, "hidden_size": 64, "heads": 2}, "max_length": 48}
    with pytest.raises(ModelError, match=r"takes none .*Give a model of the Qwen-VL family \(or model\.tiny\.vision"):
        prepare(load_config(vision_config(tmp_path, "blind", model=text)), "run")
