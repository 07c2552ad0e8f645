"""What people pick, and DPO on it: 200 pairs of the feedback page, from a scripted person over its HTTP interface.

The person picks of two answers the one that is more like the right one, and skips a pair where none is. DPO on the
exported pairs, on the same pairs picked by a coin, and SFT on what was picked start from the same weights.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pandas as pd
from rapidfuzz.distance import Levenshtein

from rayrft.buffer.reader import Archive
from rayrft.cli.reproduce import Figures
from rayrft.config.serve import FeedbackConfig
from rayrft.core.run import Run
from rayrft.core.services import serve_feedback
from rayrft.experience import Task
from rayrft.feedback.exchange import read_answers, write_feedback
from rayrft.feedback.journal import FILE, feedback_folder, read_journal
from rayrft.feedback.judgements import Judgements
from tests.bench.lessons.lessons import TINY, Row, arguments, base, figures, sft, trained, words, write_rows
from tests.e2e.conftest import free_port

PAIRS = 200
PORT = free_port()
"""Of the pages of all seeds: Ray Serve has one address in a cluster."""


def likeness() -> Callable[[Task, str], float]:
    """Return a reward: how like the right answer a response is, 1 less the edits between them, by length."""

    def score(task: Task, response: str) -> float:
        return float(Levenshtein.normalized_similarity(response.strip(), task.answer))

    return score


def shared(folder: Path, name: str, seed: int) -> Row:
    """Return what all runs share: the words, the reward, and answers of at most eight tokens."""
    tasks = {"eval_size": 500, "sources": [words(5, 8000)]}
    reward = {"name": "tests.bench.lessons.picked:likeness"}
    return {**base(name, folder, seed, 8, 40, over_sampling=1.0), "tasks": tasks, "reward": reward}


def sample(folder: Path, seed: int) -> Run:
    """Warm a model up, and sample groups of four with weights that hardly change; return the run, which has ended."""
    asked = {"name": "asked", "algorithm": {"name": "grpo"}, "steps": 8, "batch_size": 256, "group_size": 4}
    return trained(
        {
            **shared(folder, "asked", seed),
            "model": TINY,
            "demonstrations": {"warmup": {"size": 3000, "wrong_share": 0.6, "wrong_field": "word"}},
            "stages": [sft("warmup", "warmup", 200), {**asked, "optimizer": {"lr": 1e-9}}],
        }
    )


def judge(run: Run, pairs: int) -> FeedbackConfig:
    """Open the page of a run, and pick from so many pairs, as a person does who sees the right answers."""
    settings = FeedbackConfig(port=PORT)
    page = serve_feedback(run.folder, settings)
    url, key = page.url, (page.key_file or Path()).read_text().strip()
    try:
        with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=60) as http:

            def ask(path: str, **body: Any) -> Any:
                response = http.post(f"v1/{path}", json={"person": "ann", **body})
                response.raise_for_status()
                return response.json()

            picked = 0
            while picked < pairs and (item := ask("next", view="pair")["item"]) is not None:
                ids = [answer["id"] for answer in item["answers"]]
                like = {
                    answer["id"]: Levenshtein.normalized_similarity(answer["text"].strip(), item["reference"])
                    for answer in item["answers"]
                }
                ranking = sorted(ids, key=like.__getitem__, reverse=True)
                differ = like[ranking[0]] > like[ranking[1]]
                said: dict[str, Any] = {"ranking": ranking} if differ else {"skipped": True}
                ask("judge", id=f"judgement-{len(like)}-{random.getrandbits(64):x}", item=item["key"], rows=ids, **said)
                picked += differ
    finally:
        page.stop()
    return settings


def export(run: Run, settings: FeedbackConfig, folder: Path, seed: int) -> int:
    """Write the pairs, the same picked by a coin, and what was picked; return the number of pairs."""
    judgements = Judgements(settings, read_journal(feedback_folder(run.folder) / FILE))
    answers = read_answers(Archive.of_run(run.folder), {row for each in judgements.all.values() for row in each.rows})
    write_feedback(judgements, answers, folder / "picked.jsonl", "pairs")
    pairs = [json.loads(line) for line in (folder / "picked.jsonl").read_text().splitlines()]
    rng, coin = random.Random(seed), []
    for pair in pairs:
        sides = [pair["chosen"], pair["rejected"]]
        rng.shuffle(sides)
        coin.append({**pair, "chosen": sides[0], "rejected": sides[1]})
    write_rows(folder / "coin.jsonl", coin)
    write_rows(folder / "chosen.jsonl", [{"prompt": pair["prompt"], "response": pair["chosen"]} for pair in pairs])
    return len(pairs)


def train(run: Run, folder: Path, seed: int, steps: int) -> list[Run]:
    """Train on the files from the sampled weights; return the runs."""
    model = {"path": str(run.folder / "checkpoints" / "final"), "max_length": 48}
    runs = list[Run]()
    for name, rows in (("dpo-picked", 64), ("dpo-coin", 64), ("sft-chosen", 32)):
        algorithm, _, kind = name.partition("-")
        stage = {"algorithm": {"name": algorithm}, "evaluate_every": steps // 2, "optimizer": {"lr": 1e-4}}
        config = {
            **shared(folder, name, seed),
            "model": model,
            "demonstrations": {kind: {"path": str(folder / f"{kind}.jsonl")}},
            "stages": [sft(name, kind, steps, rows, **stage)],
        }
        runs.append(trained(config))
    return runs


def compare(folder: Path, seed: int) -> list[Run]:
    """Do it all; return the runs on what was picked, on a coin's picks, and of SFT."""
    run = sample(folder, seed)
    print(export(run, judge(run, PAIRS), folder, seed), "pairs")
    return train(run, folder, seed, 60)


def measure(folder: Path, seed: int) -> Figures:
    """Do it all; return the figures of `rayrft reproduce`, of likeness."""
    return figures(compare(folder, seed), "mean_reward")


def main() -> None:
    """Do it all from the seed of the command line, and print a table."""
    seed, folder = arguments()
    found = pd.concat(run.evaluations() for run in compare(folder, seed))
    print(found[["stage", "step", "temperature", "mean_reward", "accuracy", "count"]].to_string(index=False))


if __name__ == "__main__":
    main()
