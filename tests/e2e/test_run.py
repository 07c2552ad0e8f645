"""A whole small run, watched as a user would: files, counters, checkpoint, sinks."""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd
import pytest
import yaml
from huggingface_hub import constants

import rayrft
from rayrft.buffer.reader import Archive
from rayrft.config import dump_config, load_run_config
from rayrft.config.serve import ViewerConfig
from rayrft.core.plan import StepVolume
from rayrft.core.services import REPORTS
from rayrft.monitor.records import EvaluationRecord, StepRecord, read_records
from rayrft.monitor.summary import read_summary
from rayrft.runtime.serving import key_digest
from rayrft.viewer.app import VIEWS, Viewer
from tests.browser import Window, needs_chromium, served
from tests.e2e.conftest import WITHOUT_VLLM, Call, small_config
from tests.hub import TOKEN, hub
from tests.viewer.client import Client
from tests.viewer.recorded import KEY


@pytest.fixture(scope="module")
def finished(ray_cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[rayrft.Run, dict[str, Any], str]:
    """A run to its end, with two engines, two ranks, every sink, staleness 1, and a chat template of its own."""
    storage, lines = tmp_path_factory.mktemp("runs"), []
    (storage / "own.jinja").write_text(
        "{% if loud %}!{% endif %}{% for m in messages %}"
        "{% if m.role == 'assistant' %}<|assistant|>{{ m.content }}<|eos|>"
        "{% else %}<|user|>{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    config = small_config(storage, "whole")
    run = rayrft.start(
        config,
        say=lines.append,
        max_staleness=1,
        **{
            "model.template": {"file": str(storage / "own.jinja"), "options": {"loud": True}},
            "explorer.engine.count": 2,
            "trainer.ranks": 2,
            "monitor.sinks": ["wandb", "tensorboard"],
            "stages.mix.steps": 4,
            "stages.mix.evaluate_every": 2,
        },
    )
    run.watch(lines.append)
    return run, run.result(), "\n".join(lines)


def test_the_plan_is_printed_before_anything_starts_and_a_line_per_step_after(finished: Any) -> None:
    _, _, text = finished
    assert text.index("whole:engines") < text.index("starting engines and trainer") < text.index("[mix")
    assert text.count("[mix    ") >= 4 and "held-out accuracy" in text
    assert "engine log-probs equal the trainer's to" in text


def test_the_summary_closes_its_ledger_and_says_how_it_went(finished: Any) -> None:
    run, summary, _ = finished
    assert summary == read_summary(run.folder)
    assert (summary.status, summary.steps, summary.weight_version) == ("finished", 7, 7)
    ledger = summary.ledger
    assert ledger.closes
    assert ledger.trained == 4 * 16
    for temperature in ("0", "1"):
        for when in ("before", "after"):
            assert getattr(summary.accuracy[temperature], when).count == 40
    assert summary.seconds["train"] > 0 and summary.seconds["sync"] > 0
    assert [*summary.stages] == ["warmup", "mix"]


def test_the_plan_said_what_its_steps_write(finished: Any) -> None:
    run, _, _ = finished
    volumes = [each for each in rayrft.plan(run.folder / "config.yaml") if isinstance(each, StepVolume)]
    warmup, volume = volumes
    rows = list(Archive.of_run(run.folder).rows())
    count, tokens = sum(batch.num_rows for batch in rows), sum(len(row) for batch in rows for row in batch["token_ids"])
    size = sum(file.stat().st_size for file in (run.folder / "buffer").glob("*"))
    assert (volume.stage, volume.rows) == ("mix", 16) and volume.tokens / volume.rows >= tokens / count
    expected = volume.log_mb * 1e6 / volume.rows - 13 * (volume.tokens / volume.rows - tokens / count)
    assert 0.5 < size / count / expected < 2, (size, count, expected)
    for step, planned in ((3, warmup), (7, volume)):
        checkpoint = sum(file.stat().st_size for file in (run.folder / f"checkpoints/step-{step:06d}").rglob("*"))
        assert checkpoint == pytest.approx(planned.checkpoint_gb * 1e9, rel=0.25), step
        seconds = run.metrics().query("stage == @planned.stage").step_s
        assert planned.step_s == pytest.approx(seconds.median())


def test_every_step_is_recorded_with_what_it_was_made_of(finished: Any) -> None:
    run, _, _ = finished
    frame = run.metrics()
    assert isinstance(frame, pd.DataFrame) and len(frame) == 7
    assert {"stage", "reward", "policy_loss", "sft_loss", "train_s"} <= set(frame.columns)
    steps = [record for record in read_records(run.folder) if isinstance(record, StepRecord)]
    assert [step.step for step in steps] == [1, 2, 3, 4, 5, 6, 7]
    for step in steps[3:]:
        assert (step.usual_rows, step.expert_rows) == (16, 4)
        assert step.staleness_max is not None and step.staleness_max <= 1
        assert step.metrics.policy_tokens > 0 and step.metrics.expert_tokens > 0
    assert steps[3].staleness_max == 0, "nothing was published before the first step of the stage"
    assert steps[3].metrics.logprob_gap < 1e-4, "fresh rows: the engine's log-probs are the trainer's"
    evaluations = [record for record in read_records(run.folder) if isinstance(record, EvaluationRecord)]
    assert [e.step for e in evaluations if e.temperature == 0] == [0, 3, 5, 7]
    lines = (run.folder / "answers" / "explorer-0.000000.jsonl").read_text().splitlines()
    measured = [answer for answer in map(json.loads, lines) if answer["group_status"] == "evaluation"]
    found = Counter((answer["version"], answer["metrics"]["temperature"]) for answer in measured)
    assert found == {(step, temperature): 40 for step in (0, 3, 5, 7) for temperature in (0.0, 1.0)}


def test_the_checkpoint_loads_with_transformers_and_is_what_was_trained(finished: Any) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run, summary, _ = finished
    model = AutoModelForCausalLM.from_pretrained(summary.checkpoint)
    start = AutoModelForCausalLM.from_pretrained(run.folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(summary.checkpoint)
    assert tokenizer.eos_token == "<|eos|>" and model.generation_config.eos_token_id == [tokenizer.eos_token_id]
    shown = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert shown == "!<|user|>hi<|assistant|>", "the template that was trained with"
    archive = Archive.of_run(run.folder)
    rows = [ids for store in archive.stores for batch in archive.rows(store) for ids in batch["token_ids"].to_pylist()]
    assert rows and all(tokenizer.decode(ids).startswith("!<|user|>") for ids in rows), "sampled and demonstrated alike"
    pairs = list(zip(model.parameters(), start.parameters(), strict=True))
    assert all(torch.isfinite(new).all() for new, _ in pairs)
    assert any(not torch.equal(new, old) for new, old in pairs)
    kept = {"warmup", "mix", "final", "step-000003", "step-000007"}
    assert {path.name for path in (run.folder / "checkpoints").iterdir()} == kept


def test_plot_wandb_and_tensorboard_were_written(finished: Any) -> None:
    run, _, _ = finished
    assert (run.folder / "plot.png").stat().st_size > 5000
    assert list(run.folder.glob("wandb/offline-run-*/*.wandb"))
    assert list(run.folder.glob("tensorboard/events*"))


async def test_the_viewer_answers_every_query_of_the_run_as_its_files_say(
    finished: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rayrft: Call
) -> None:
    run, summary, _ = finished
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    client = Client(run.folder.parent, reports=REPORTS)
    rows = await client.rows(run="whole", group_status="trained")
    assert rows["count"] == summary.ledger.trained == rows["log"]["ledger"]["trained"]
    for name in (name for view in VIEWS for name in view.QUERIES if name != "image"):  # the tasks have none
        about = {
            "runs": {},
            "compare": {"runs": "whole"},
            "row": {"run": "whole", "id": rows["rows"][0]["experience_id"]},
        }
        assert await client.ask(name, **about.get(name, {"run": "whole"}))
    lanes = {each["lane"]: each["names"] for each in (await client.ask("timeline", run="whole", first=4))["lanes"]}
    assert {"buffer", "trainer", "engine-0", "engine-1", "rank-0", "rank-1"} <= lanes.keys()
    assert {"lease"} <= lanes["buffer"].keys() and {"train"} <= lanes["trainer"].keys()
    assert {"forward and backward", "optimizer", "send"} <= lanes["rank-0"].keys()
    assert {"generate", "receive"} <= lanes["engine-0"].keys()
    assert "score" in {name for names in lanes.values() for name in names}
    assert {"master", "explorer-0", "rank-0"} <= {file.stem for file in (run.folder / "trace").iterdir()}
    traced = rayrft("trace", str(run.folder), "--to", str(tmp_path / "trace.json"))
    assert traced.returncode == 0, traced.stderr
    events = {each["name"] for each in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]}
    assert {"lease", "train", "generate", "forward and backward", "step 7"} <= events
    await client.http.aclose()


def test_a_checkpoint_is_exported_as_it_was_saved(finished: Any, tmp_path: Path, rayrft: Call) -> None:
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run, summary, _ = finished
    made = rayrft("export", str(run.folder), "--to", str(tmp_path / "last"))
    assert made.returncode == 0 and "step 7 written" in made.stdout, made.stderr
    final = load_file(Path(summary.checkpoint) / "model.safetensors")
    exported = load_file(tmp_path / "last/model.safetensors")
    assert final.keys() == exported.keys()
    assert all(torch.equal(final[name], exported[name]) for name in final)
    exports = [AutoTokenizer.from_pretrained(folder) for folder in (summary.checkpoint, tmp_path / "last")]
    assert exports[0].chat_template == exports[1].chat_template and exports[1].eos_token == "<|eos|>"
    early = rayrft("export", str(run.folder), "--step", "3", "--to", str(tmp_path / "early"))
    assert early.returncode == 0, early.stderr
    weights = AutoModelForCausalLM.from_pretrained(tmp_path / "early").state_dict()
    assert not any(torch.equal(final[name], weights[name]) for name in final)
    missing = rayrft("export", str(run.folder), "--step", "5", "--to", str(tmp_path / "none"))
    assert missing.returncode == 1 and "Choose one of the steps [3, 7]" in missing.stderr
    again = rayrft("export", str(run.folder), "--to", str(tmp_path / "last"))
    assert again.returncode == 1 and "not empty" in again.stderr


def test_a_checkpoint_is_pushed_to_the_hub_with_a_card_of_how_it_was_made(
    finished: Any, tmp_path: Path, rayrft: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, summary, _ = finished
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with hub() as (url, kept):

        def export(to: str, endpoint: str = url, token: str = TOKEN) -> subprocess.CompletedProcess[str]:
            monkeypatch.setattr(constants, "ENDPOINT", endpoint)
            monkeypatch.setenv("HF_TOKEN", token)
            return rayrft("export", str(run.folder), "--to", str(tmp_path / to), "--push", "acme/words", "--private")

        for problem in ({"token": "hf_wrong"}, {"endpoint": "http://127.0.0.1:9"}):
            refused = export("none", **problem)
            assert refused.returncode == 1 and "push: the hub refused" in refused.stderr, refused.stderr
            assert "Traceback" not in refused.stderr and not (tmp_path / "none").exists() and not kept.files
        done = export("made")
    assert done.returncode == 0 and f"uploaded to {url}/acme/words" in done.stdout, done.stderr
    assert (kept.created[0]["visibility"], kept.created[0]["organization"]) == ("private", "acme")
    written = {path.name: path.read_bytes() for path in (tmp_path / "made").iterdir()}
    assert kept.files == written and {"README.md", "plot.png", "model.safetensors"} <= written.keys()
    _, about, card = written["README.md"].decode().split("---\n", 2)
    assert yaml.safe_load(about)["tags"] == ["rayrft", "reinforcement-learning", "sft", "mix"]
    assert "| warmup | sft | 3 |" in card and "| mix | mix | 4 |" in card
    last = summary.accuracy["0"].after
    assert f"({last.right}/{last.count}, " in card and f"| sampled | {summary.ledger.sampled} |" in card
    assert dump_config(load_run_config(run.folder)) in card


@contextmanager
def viewed(run: rayrft.Run, chromium: Any, *queries: str) -> Iterator[Iterable[Window]]:
    """Windows of a viewer of the run's storage."""
    app = Viewer(run.folder.parent, ViewerConfig(), (key_digest(KEY),), reports=REPORTS).app()
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as cache, served(app) as url:
        patch.setenv("XDG_CACHE_HOME", cache)
        windows = [Window(chromium, url, query, key=KEY) for query in queries]
        yield windows
        for window in windows:
            window.leave()


@needs_chromium
def test_every_page_of_the_run_shows_what_it_left(finished: Any, browser: Any) -> None:
    run, summary, _ = finished
    with viewed(run, browser, "") as [window]:
        window.see(".ledger").to_contain_text(f"{summary.ledger.trained} trained")
        window.click("article.run a:text-is('whole')")
        plot = window.page.locator("figure:has-text('Accuracy') .u-over")
        plot.click(position={"x": plot.bounding_box()["width"] - 2, "y": 40})
        window.see(".pages").to_contain_text("of 80 rows")
        window.click("table.rows a >> nth=0")
        window.see("#drawer dl").to_contain_text("measured in an evaluation")
        table = "table.rows a"
        for view, shown in {"Experiences": table, "Tasks": table, "Timeline": "canvas", "Plan": "table.rows"}.items():
            window.click(f"nav a:text-is('{view}')")
            window.see(f"main {shown} >> nth=0").to_be_visible()


@needs_chromium
def test_the_pages_of_a_run_follow_its_steps(ray_cluster: Any, browser: Any, tmp_path: Path) -> None:
    run = rayrft.start(small_config(tmp_path, "live", **WITHOUT_VLLM), **{"stages.mix.steps": 500})
    page = "?run=live&view="
    with viewed(run, browser, f"{page}run", f"{page}experiences&group_status=trained") as (curves, rows):
        next(record for record in run.records() if isinstance(record, StepRecord) and record.stage == "mix")
        curves.see(".facts").to_contain_text(re.compile(r"[1-9]\d* / 503"))
        curves.see(".pill >> nth=0").to_have_text("running")
        rows.see(".mean").to_contain_text(re.compile(r"[1-9]\d* rows"))
        for window, number in ((curves, ".metric:has-text('step') b >> nth=0"), (rows, ".mean")):
            window.see(number).not_to_have_text(window.page.inner_text(number))
        run.stop()
        curves.see(".pill >> nth=0").to_have_text("stopped")
