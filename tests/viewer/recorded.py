"""A run folder that is written step by step, without engines and trainer: a Buffer's log, records and images."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rayrft.config import dump_config, load_config
from rayrft.data.images import keep_image
from rayrft.experience import Experience, VersionSpan
from rayrft.monitor.records import NoteRecord, RecordFile, RestartRecord
from rayrft.monitor.summary import Totals, summarise, write_summary
from rayrft.trainer.result import RowGap
from tests.buffer.in_process import InlineLoop, LocalBuffer, ObjectTable
from tests.buffer.rows import expert_rows, packed, plan
from tests.e2e.conftest import small_config
from tests.monitor.made import evaluation, step

SCRIPT = "<script>document.title = 'taken'</script><img src=x onerror=\"document.title = 'taken'\">"
"""What the model says in an answer of the first group."""
WORDS = ("the", "sum", "is", "then", "divided", "by", "three", "which", "gives", "what", "was", "asked", "in", "total")
GROUPS, ROWS = 3, 4
Steps = Callable[[float], dict[str, Any]]
Row = Callable[[float, int], dict[str, Any]]
_BEGAN = time.time() - 7200


def write_spans(run: Path, actor: str, lines: list[list[Any]]) -> None:
    """Append lines to the trace of an actor, as `rayrft.runtime.trace` describes them."""
    (run / "trace").mkdir(exist_ok=True)
    with (run / "trace" / f"{actor}.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def stretch(run: Path, steps: int, fields: Callable[[int], dict[str, Any]]) -> None:
    """Make the records of a run those of so many steps, each like the first with other fields, by its number."""
    records = run / "metrics.jsonl"
    first = next(filter(lambda each: each["kind"] == "step", map(json.loads, records.read_text().splitlines())))
    many = [json.dumps({**first, "step": step, **fields(step)}) for step in range(1, steps + 1)]
    records.write_text("\n".join(many) + "\n")


class ApartBuffer(LocalBuffer):
    """A Buffer whose loop runs in another thread, so that tests with a loop of their own may call it."""

    make_loop = InlineLoop

    def run(self, work: Awaitable[Any]) -> Any:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(super().run, work).result()

    def kill(self) -> None:
        with ThreadPoolExecutor(1) as thread:
            thread.submit(super().kill).result()


class RecordedRun:
    """A run of stage ``mix``: groups of questions with a calculator; every fourth has an image, and every fifth step a
    group that is too old when it comes. ``tokenizer`` encodes texts; without it tokens are characters. ``planted`` are
    fields of a step, by the share of the run that is done, and of a row, by its number in the group, too."""

    def __init__(
        self,
        storage: Path,
        name: str = "words",
        tokenizer: Any = None,
        seed: int = 0,
        planted: tuple[Steps, Row] = (lambda done: {}, lambda done, number: {}),
        planned: int = 40,
    ) -> None:
        settings = small_config(storage, name, seed=seed)
        settings["stages"] = [settings["stages"][1] | {"steps": planned}]
        self._planted, self._planned = planted, planned
        config = load_config(settings)
        self.folder, self.name, self.steps = config.folder, name, 0
        self.folder.mkdir(parents=True)
        (self.folder / "config.yaml").write_text(dump_config(config))
        self._patch = pytest.MonkeyPatch()
        ObjectTable(self._patch)
        self.buffer = ApartBuffer(self.folder / "buffer", config.buffer, run=f"{name}-{seed}")
        self._records, self._tokenizer, self._random = RecordFile(self.folder), tokenizer, random.Random(seed)
        self._groups = 0
        self.buffer.do("load", "gold", packed(expert_rows(3)))
        self.buffer.do("open_stage", plan(GROUPS, scheduled=False, max_age=2))
        self._records.append(NoteRecord("mix", 0, _BEGAN, "stage 'mix': mix, 40 steps of 3 groups of 4"))
        self._evaluate()

    def train(self, steps: int = 1) -> None:
        """Take steps: put their groups, train on them, and record it."""
        for _ in range(steps):
            groups = [self.group() for _ in range(GROUPS)]
            self.buffer.put(
                [(rows, None) for rows in groups], dropped={"zero_variance": ROWS} if self.steps % 3 else None
            )
            if self.steps % 5 == 4:
                self.buffer.put([(self.group(age=4), None)])
            self.buffer.trained(self.steps, advance=True)
            self.steps += 1
            if self.steps % 10 == 0:
                self.note("writes a checkpoint", checkpoint=self.steps)
            self._record([row for rows in groups for row in rows])
            if self.steps % 10 == 0:
                self._evaluate()

    def note(self, text: str, **data: Any) -> None:
        self._records.append(NoteRecord("mix", self.steps, self._now, text, data))

    def restart(self, cause: str) -> None:
        self._records.append(RestartRecord("mix", self.steps, self._now, "engine", "engine-0", cause, 4.2))

    def finish(self, status: str = "finished", error: str | None = None) -> None:
        """Write how the run ended."""
        totals = Totals()
        for record in self._records.read():
            totals.add(record)
        summary = summarise(self.name, status, error, totals, self.buffer.do("stats"), 60.0 * self.steps)
        write_summary(self.folder, summary)

    def close(self) -> None:
        self.buffer.kill()
        self._records.close()
        self._patch.undo()

    @property
    def _now(self) -> float:
        return _BEGAN + 60.0 * self.steps

    @property
    def skill(self) -> float:
        return 0.15 + 0.75 * (1 - np.exp(-self.steps / 18))

    def group(self, age: int = 0) -> list[Experience]:
        number, self._groups = self._groups, self._groups + 1
        version, task = max(self.steps - age, 0), number % 7
        images: tuple[str, ...] = ()
        if number % 4 == 3:
            drawn = Image.new("RGB", (160, 90), (40 * task, 90, 200))
            images = (keep_image(drawn, self.folder / "images"),)
        name = f"{self.name}/mix/{number}/task{task:02d}"
        rows = [self._row(name, task, repeat, version, images, first=number == 0) for repeat in range(ROWS)]
        done, fields = self.steps / (self._planned - 1), self._planted[1]
        return [row.with_fields(**fields(done, repeat)) for repeat, row in enumerate(rows)]

    def _row(self, name: str, task: int, repeat: int, version: int, images: tuple[str, ...], first: bool) -> Experience:
        chance = self._random
        right = chance.random() < self.skill * (0.4 + 0.1 * task)
        said = (
            " ".join(chance.choices(WORDS, k=chance.randint(6, 30))).capitalize()
            + f". So it is {40 + task + (not right)}."
        )
        turns = [
            {"role": "system", "content": "Use the calculator, and answer with a number."},
            {"role": "user", "content": f"Question {task}: how much is {task} + 40?"},
            {"role": "assistant", "content": f'<tool_call>{{"name": "add", "arguments": [{task}, 40]}}</tool_call>'},
            {"role": "tool", "content": str(40 + task)},
            {"role": "assistant", "content": SCRIPT if first and repeat == 0 else said},
        ]
        ids: list[int] = []
        mask: list[int] = []
        for turn in turns:
            text = turn["content"] + "\n"
            tokens = self._tokenizer.encode(text).ids if self._tokenizer else [ord(letter) for letter in text]
            ids += tokens
            mask += [int(turn["role"] == "assistant")] * len(tokens)
        start, end = mask.index(1), len(ids)
        logprobs = np.array([-chance.expovariate(2.5) if of_model else 0.0 for of_model in mask], np.float32)
        teacher = np.array([min(each + chance.gauss(0, 0.4), 0.0) if each else 0.0 for each in logprobs], np.float32)
        half = (start + end) // 2
        newer = [VersionSpan(half, end, version + 1)] if version < self.steps else []
        spans = [VersionSpan(start, half if newer else end, version), *newer]
        cut = chance.random() < 0.08
        return Experience(
            f"{name}/{repeat}",
            name,
            f"task{task:02d}",
            np.array(ids, np.int32),
            start,
            np.array(mask, np.uint8),
            logprobs,
            weight_versions=tuple(spans),
            reward=float(right),
            reward_components={"right": float(right), "form": 1.0},
            stop_reason="length" if cut else "stop",
            error=None if right else f"expected {40 + task}",
            turns=tuple(turns),
            images=images,
            teacher_logprobs=teacher,
            created_at=self._now - 5,
            finished_at=self._now,
        )

    def _record(self, rows: list[Experience]) -> None:
        noise = self._random.gauss
        reward = sum(row.reward or 0.0 for row in rows) / len(rows)
        tokens = int(sum(row.action_mask.sum() for row in rows))
        done = self.steps / 40
        at = self._now - 10.0
        write_spans(
            self.folder, "master", [[at + 5.2, 5.2, "buffer", "lease", 1.0], [at + 9, 3.6, "trainer", "train", 1.0]]
        )
        parts = {"rollout": 4.0, "reward": 0.8, "store": 0.1}
        spans = [[at + 4.1, 4.0, "engine-0", "generate", 12.0], [at + 5, 4.9, "groups", rows[-1].group_id, 1.0, parts]]
        write_spans(self.folder, "explorer-0", [*spans, [at + 4.9, 0.8, "reward of domain 'own'", "score", 3.0]])
        last = rows[-1]
        gap = RowGap(last.experience_id, 0.1 + self.steps / 100, ((len(last.token_ids) - 1, -0.75),))
        planted = self._planted[0]((self.steps - 1) / (self._planned - 1))
        lost = {name[6:]: rows for name, rows in planted.items() if name.startswith("lost: ")}
        self._records.append(
            step(
                **dict(
                    step=self.steps,
                    version=self.steps,
                    time=self._now,
                    widest_gap=gap,
                    reward=reward,
                    usual_rows=len(rows),
                    expert_rows=2,
                    sampled_rows=len(rows),
                    sampled_tokens=tokens,
                    truncated_share=0.08 * (1 - done),
                    staleness_mean=0.5,
                    staleness_max=1,
                    tokens_per_s=1100 + noise(0, 90),
                    step_s=10.0,
                    wait_s=5.2,
                    train_s=3.6,
                    sync_s=0.7,
                    policy_loss=noise(0, 0.02),
                    sft_loss=1.4 * np.exp(-2 * done) + abs(noise(0, 0.02)),
                    kl=0.02 * done + abs(noise(0, 0.001)),
                    entropy=1.3 - 0.8 * done + noise(0, 0.03),
                    clip_fraction=abs(noise(0.02, 0.01)),
                    logprob_gap=abs(noise(4e-3, 1e-3)),
                    grad_norm=abs(noise(0.6, 0.1)),
                    rollout_s=5.0,
                    reward_s=0.3,
                    ratio=1.0,
                )
                | {"lost": lost, **planted}
            )
        )

    def _evaluate(self) -> None:
        right = int(100 * min(0.95, self.skill * 0.9))
        for temperature, less in ((0.0, 0), (1.0, 8)):
            self._records.append(evaluation("mix", self.steps, max(right - less, 0), temperature, self.steps))


def record_runs(storage: Path, model: Path) -> None:
    """Record `words`, which finished after 12 steps, `other`, which failed, and `fresh`, which has no step yet."""
    from tokenizers import Tokenizer

    words = RecordedRun(storage, "words", Tokenizer.from_file(str(model / "tokenizer.json")))
    (words.folder / "model").symlink_to(model)
    words.train(7)
    words.note("stages.mix.algorithm.mu: 0.1 -> 0.05", key="stages.mix.algorithm.mu", old=0.1, new=0.05)
    words.restart("its process died")
    words.train(5)
    words.buffer.do("feedback", "words/mix/0/task00/1", 1.0, {"quality": "good"})
    words.finish()
    other = RecordedRun(storage, "other", seed=1)
    other.train(4)
    other.finish("failed", f"trainer rank 0: {SCRIPT}")
    fresh = RecordedRun(storage, "fresh", seed=2)
    for run in (words, other, fresh):
        run.close()


KEY = "sk-right"


FILTERS = {
    "min_reward": (1, lambda row: row["reward"] >= 1),
    "max_reward": (0.5, lambda row: row["reward"] <= 0.5),
    "min_tokens": (150, lambda row: sum(row["action_mask"]) >= 150),
    "max_tokens": (150, lambda row: sum(row["action_mask"]) <= 150),
    "min_staleness": (0, lambda row: row["uses"] > 0),
    "max_staleness": (-1, lambda row: False),
    "min_version": (6, lambda row: min(span["version"] for span in row["weight_versions"]) >= 6),
    "max_version": (1, lambda row: min(span["version"] for span in row["weight_versions"]) <= 1),
    "min_step": (12, lambda row: row["uses"] and row["trained_step"] == 11),
    "max_step": (1, lambda row: row["uses"] and row["trained_step"] == 0),
    "source": ("usual", lambda row: True),
    "status": ("finished", lambda row: True),
    "stop_reason": ("length", lambda row: row["stop_reason"] == "length"),
    "group_status": ("trained", lambda row: row["group_status"] == "trained"),
    "drop_reason": ("late", lambda row: row["group_status"] == "dropped"),
    "task_id": ("task03", lambda row: row["task_id"] == "task03"),
    "group_id": ("words/mix/4/task04", lambda row: row["group_id"] == "words/mix/4/task04"),
    "text": ("DOCUMENT.TITLE", lambda row: row["experience_id"] == "words/mix/0/task00/0"),
    "where": (
        "stop_reason = 'length' and reward < 1",
        lambda row: row["stop_reason"] == "length" and row["reward"] < 1,
    ),
}
