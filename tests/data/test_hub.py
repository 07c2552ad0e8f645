"""Data sets and models that are loaded from a hub, which is one on loopback (HF_ENDPOINT)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.hub import TOKEN, hub

CARD = """---
configs:
- config_name: sums
  data_files: [{split: train, path: sums/train.jsonl}, {split: test, path: sums/test.jsonl}]
- config_name: words
  data_files: [{split: train, path: words.jsonl}]
---
"""
LOADS = """
import json, os, sys
from rayrft.config.demonstrations import DemonstrationsConfig
from rayrft.config.tasks import TaskSourceConfig
from rayrft.data.demonstrations import RowEncoder, from_source
from rayrft.data.models import find_model
from rayrft.data.task_sources import read_source
from rayrft.data.tokenizer import ChatTokenizer
from rayrft.errors import RayrftError


def loaded(order):
    os.environ["HF_TOKEN"] = order.pop("token", os.environ["HF_TOKEN"])
    if "model" not in order:
        return [[task.question, task.answer] for task in read_source(TaskSourceConfig(**order), "tasks.sources.0")]
    from transformers import AutoModelForCausalLM

    tokenizer = ChatTokenizer(find_model(order["model"], "model.path"))
    model = AutoModelForCausalLM.from_pretrained(order["model"])
    form = DemonstrationsConfig.model_validate(order["rows"])
    [row, *_], _ = from_source(RowEncoder("gold", form, tokenizer, 4096))
    return [sum(each.numel() for each in model.parameters()), row.token_ids.tolist()]


said = []
for order in json.loads(sys.stdin.read()):
    try:
        said.append(loaded(order))
    except RayrftError as error:
        said.append([error.field, str(error)])
print(json.dumps(said))
"""


def sums(count: int) -> bytes:
    return "".join(json.dumps({"question": f"{n} + 1?", "answer": str(n + 1)}) + "\n" for n in range(count)).encode()


MODEL = {"model": "acme/tiny", "rows": {"dataset": "acme/sums", "config": "sums"}}
ASKED: list[tuple[dict[str, Any], int | str]] = [
    ({"config": "sums"}, 3),
    ({"config": "sums", "revision": "v1"}, 2),
    ({"config": "sums", "split": "test"}, 1),
    ({"config": "sums", "split": "test", "streaming": True, "revision": "v1"}, 1),
    ({"config": "words", "streaming": True}, 1),
    ({}, "config"),
    ({"config": "sums", "revision": "v2"}, "revision"),
    ({"dataset": "acme/others", "token": "hf_wrong"}, "dataset"),
]
"""Changes of a source: the number of its rows, or the key that is refused."""


@pytest.fixture(scope="module")
def loaded(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What a process of its own loads: the libraries read the address when they are imported."""
    files = {"README.md": CARD.encode(), "sums/train.jsonl": sums(3), "sums/test.jsonl": sums(1)}
    files["words.jsonl"] = b'{"question": "spell cat", "answer": "tac"}\n'
    orders = [MODEL, *({"source": "datasets", "dataset": "acme/sums", **more} for more, _ in ASKED)]
    with hub() as (address, kept):
        kept.repos["acme/tiny"] = {"main": {file.name: file.read_bytes() for file in tiny_model.iterdir()}}
        kept.repos["datasets/acme/sums"] = {"main": files, "v1": {**files, "sums/train.jsonl": sums(2)}}
        kept.repos["datasets/acme/others"] = {"main": {"train.jsonl": sums(2)}}
        settings = {"HF_ENDPOINT": address, "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0", "PYTHONPATH": str(ROOT)}
        variables = {**os.environ, **settings, "HF_HOME": str(tmp_path_factory.mktemp("home"))}
        command = [sys.executable, "-c", LOADS]
        done = subprocess.run(command, input=json.dumps(orders), capture_output=True, text=True, env=variables)
    assert done.returncode == 0, done.stderr[-2000:]
    found: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_data_set_of_a_hub_is_read_by_config_split_and_revision(loaded: list[Any]) -> None:
    assert loaded[3] == [["0 + 1?", "1"]] and loaded[5] == [["spell cat", "tac"]]
    for result, (more, expected) in zip(loaded[1:], ASKED, strict=True):
        if isinstance(expected, int):
            assert len(result) == expected, more
        else:
            assert result[0] == f"tasks.sources.0.{expected}", more


def test_a_model_and_its_tokenizer_come_from_a_hub(loaded: list[Any], tiny_model: Path) -> None:
    from transformers import AutoModelForCausalLM

    from rayrft.data.tokenizer import ChatTokenizer

    size, ids = loaded[0]
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    assert size == sum(each.numel() for each in model.parameters())
    turns = [{"role": "user", "content": "0 + 1?"}, {"role": "assistant", "content": "1"}]
    assert ids == ChatTokenizer(tiny_model).chat(turns)[0]
