"""A small run that trains an adapter: the engines follow it, and what it leaves is a model like any other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import rayrft
from rayrft.core.export import export
from rayrft.monitor.records import StepRecord, read_records
from tests.e2e.conftest import small_config


@pytest.mark.usefixtures("ray_cluster")
def test_engines_follow_an_adapter_through_two_stages(tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    said: list[str] = []
    run = rayrft.start(
        small_config(tmp_path, "lora", evaluation={"enabled": False}),
        say=said.append,
        **{
            "trainer.lora.rank": 4,
            "trainer.ranks": 2,
            "stages.warmup.optimizer.lr": 1e-2,
            "stages.mix.optimizer.lr": 1e-2,
            "stages.mix.algorithm.kl": "k3",
            "stages.mix.steps": 3,
            "weight_sync.probe_every": 1,
        },
    )
    run.watch(said.append)
    summary = run.result()
    assert summary["status"] == "finished"
    warmup, mix = (
        [r for r in read_records(run.folder) if isinstance(r, StepRecord) and r.stage == stage]
        for stage in ("warmup", "mix")
    )
    assert warmup[-1].sft_loss < warmup[0].sft_loss
    assert all(step.probe_gap is not None and step.probe_gap <= 1e-4 for step in mix)
    assert mix[0].logprob_gap < 1e-4 and not [line for line in said if "first step of" in line]
    assert mix[0].kl == pytest.approx(0.0, abs=1e-9), "the reference is not the policy as the stage began"
    assert mix[-1].kl > 1e-6

    export(run.folder, tmp_path / "whole")
    export(run.folder, tmp_path / "adapter", merged=False)
    base = AutoModelForCausalLM.from_pretrained(run.folder / "checkpoints" / "warmup")
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        start = base(ids).logits
        ends = [
            AutoModelForCausalLM.from_pretrained(path)(ids).logits
            for path in (summary["checkpoint"], tmp_path / "whole")
        ]
        ends.append(PeftModel.from_pretrained(base, tmp_path / "adapter")(ids).logits)
    for end in ends[1:]:
        torch.testing.assert_close(end, ends[0], atol=1e-4, rtol=1e-4)
    assert (ends[0] - start).abs().max() > 1e-2
