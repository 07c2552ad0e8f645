"""Evaluation harnesses find at the endpoint what they find elsewhere: their newest releases, on real vLLM."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

import rayrft
from tests.conftest import ROOT
from tests.e2e.conftest import Call, endpoint_of
from tests.e2e.serving import make_config
from tests.newest import environment

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment(tmp_path_factory.mktemp("harnesses") / "venv", "lm-eval[api]", "inspect-ai")


@pytest.fixture
def run(ray_cluster: Any, tmp_path: Path, port: int) -> Iterator[rayrft.Run]:
    """Of a model that repeats the last letter of a question."""
    (tmp_path / "template").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    config = make_config(tmp_path, port)
    config["model"]["template"] = {"file": str(tmp_path / "template")}
    config["serve"] |= {"keys_file": None, "model_name": "policy"}
    run = rayrft.start(config, say=lambda text: None)
    yield run
    run.kill()


def found(python: Path, *arguments: str) -> Any:
    """What the program prints last."""
    command = [str(python), "-m", "tests.e2e.evaluating", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, "OPENAI_API_KEY": "-"})
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_log_likelihoods_are_those_of_transformers_and_accuracy_is_that_of_the_bench(
    python: Path, run: rayrft.Run, tmp_path: Path, other_process: Call
) -> None:
    url, model = endpoint_of(run), run.folder / "model"
    ours, theirs = found(python, "lm_eval", url, str(model))
    for part in ("pairs", "rolling"):
        for mine, other in zip(ours[part], theirs[part], strict=True):
            likelihood, greedy = (mine, None) if isinstance(mine, float) else mine
            wanted, wanted_greedy = (other, None) if isinstance(other, float) else other
            assert likelihood == pytest.approx(wanted, abs=1e-4) and likelihood < -1
            assert greedy == wanted_greedy
    assert ours["said"] == theirs["said"] and len(set(ours["said"])) > 1

    client = openai.OpenAI(base_url=url, api_key="-")
    questions = [f"Spell this word backward: {word}" for word in ("cat", "horse", "bird", "fish", "owl")]
    rows = []
    for number, question in enumerate(questions):
        asked: Any = {"messages": [{"role": "user", "content": question}], "temperature": 0}
        said = client.chat.completions.create(model="policy", **asked).choices[0].message.content
        assert said
        rows.append({"question": question, "answer": said if number % 2 else "nothing of the kind"})
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert found(python, "inspect", url, str(path)) == pytest.approx(0.4)
    bench = {
        "name": "b",
        "mode": "bench",
        "storage": str(tmp_path / "runs"),
        "model": {"max_length": 512, "template": {"file": str(tmp_path / "template")}},
        "explorer": {"sampling": {"max_tokens": 8}, "engine": {"count": 1}},
        "reward": {"name": "exact", "truncated": "score"},  # all answers of this model are cut
        "bench": {
            "models": {"policy": str(model)},
            "tasksets": {"questions": {"source": "file", "path": str(path)}},
            "temperature": 0,
        },
    }
    (tmp_path / "bench.yaml").write_text(json.dumps(bench))
    done = other_process("bench", str(tmp_path / "bench.yaml"))
    assert done.returncode == 0 and "0.400" in done.stdout, done.stdout + done.stderr
