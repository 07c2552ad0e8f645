"""Data sets and models that are loaded from a hub, which is one on loopback (HF_ENDPOINT)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

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
import json, sys
from rayrft.config.demonstrations import DemonstrationsConfig
from rayrft.config.tasks import TaskSourceConfig
from rayrft.data.demonstrations import RowEncoder, from_source
from rayrft.data.models import find_model
from rayrft.data.task_sources import read_source
from rayrft.data.tokenizer import ChatTokenizer
from rayrft.errors import RayrftError


def loaded(order):
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


def load(address: str, home: Path, *orders: dict[str, Any], token: str = TOKEN) -> list[Any]:
    """Load in a process of its own: the libraries read the address when they are imported."""
    settings = {"HF_ENDPOINT": address, "HF_TOKEN": token, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0"}
    command, variables = [sys.executable, "-c", LOADS], {**os.environ, **settings, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, input=json.dumps(orders), capture_output=True, text=True, env=variables)
    assert done.returncode == 0, done.stderr[-2000:]
    found: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_data_set_of_a_hub_is_read_by_config_split_and_revision(tmp_path: Path) -> None:
    files = {"README.md": CARD.encode(), "sums/train.jsonl": sums(3), "sums/test.jsonl": sums(1)}
    files["words.jsonl"] = b'{"question": "spell cat", "answer": "tac"}\n'
    asked = {"source": "datasets", "dataset": "acme/sums"}
    orders: list[tuple[dict[str, Any], int | str]] = [
        ({"config": "sums"}, 3),
        ({"config": "sums", "revision": "v1"}, 2),
        ({"config": "sums", "split": "test"}, 1),
        ({"config": "sums", "split": "test", "streaming": True, "revision": "v1"}, 1),
        ({"config": "words", "streaming": True}, 1),
        ({}, "config"),
        ({"config": "sums", "revision": "v2"}, "revision"),
    ]
    with hub() as (address, kept):
        kept.repos["datasets/acme/sums"] = {"main": files, "v1": {**files, "sums/train.jsonl": sums(2)}}
        found = load(address, tmp_path / "home", *({**asked, **more} for more, _ in orders))
        assert found[2] == [["0 + 1?", "1"]] and found[4] == [["spell cat", "tac"]]
        for result, (more, expected) in zip(found, orders, strict=True):
            if isinstance(expected, int):
                assert len(result) == expected, more
            else:
                assert result[0] == f"tasks.sources.0.{expected}", more
        [[field, _]] = load(address, tmp_path / "other", asked, token="hf_wrong")
        assert field == "tasks.sources.0.dataset"


def test_a_model_and_its_tokenizer_come_from_a_hub(tiny_model: Path, tmp_path: Path) -> None:
    with hub() as (address, kept):
        kept.repos["acme/tiny"] = {"main": {file.name: file.read_bytes() for file in tiny_model.iterdir()}}
        kept.repos["datasets/acme/sums"] = {"main": {"train.jsonl": sums(2)}}
        order = {"model": "acme/tiny", "rows": {"dataset": "acme/sums"}}
        [[size, ids]] = load(address, tmp_path / "home", order)
    from transformers import AutoModelForCausalLM

    from rayrft.data.tokenizer import ChatTokenizer

    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    assert size == sum(each.numel() for each in model.parameters())
    turns = [{"role": "user", "content": "0 + 1?"}, {"role": "assistant", "content": "1"}]
    assert ids == ChatTokenizer(tiny_model).chat(turns)[0]
