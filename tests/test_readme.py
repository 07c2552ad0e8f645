"""What the README and the READMEs of the rooms promise: short, no dead links, and examples that run."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from rayrft.cli.main import app
from rayrft.config import load_config, parse_override
from rayrft.config.changes import change_config
from rayrft.data.tokenizer import ChatTokenizer
from rayrft.experience import Task
from rayrft.explorer.rollout import Runner
from rayrft.rewards import RewardResult, Transcript, build_reward
from rayrft.rewards.base import score as score_one
from tests.conftest import ROOT
from tests.explorer.scripted import Engines, config
from tests.reference import PAGES

READMES = [ROOT / "README.md", *sorted((ROOT / "rayrft").glob("**/README.md")), ROOT / "tests" / "bench" / "README.md"]
TASK = Task.create("test", "Spell this word backward: horse", "esroh")


def examples(readme: Path) -> list[str]:
    """Blocks of Python that register a piece."""
    blocks = re.findall(r"```python\n(.*?)```", readme.read_text(), re.DOTALL)
    return [block for block in blocks if re.search(r"^@\S+register", block, re.MULTILINE)]


def test_the_readme_is_short() -> None:
    assert len(READMES[0].read_text().splitlines()) <= 170


def test_the_references_are_those_of_the_models_and_registries(tmp_path: Path) -> None:
    # In a process of its own: other tests register pieces in this one.
    subprocess.run([sys.executable, "-m", "tests.reference", tmp_path], cwd=ROOT, check=True)
    for page in PAGES:
        assert (ROOT / page).read_text() == (tmp_path / page).read_text(), "stale: run `python -m tests.reference`"


@pytest.mark.parametrize("readme", sorted((ROOT / "rayrft").glob("*/README.md")), ids=lambda path: path.parent.name)
def test_a_room_says_what_can_be_done_then_how_to_add_to_it_then_what_is_there_and_how_it_works(readme: Path) -> None:
    text = readme.read_text()
    assert "\n| I want to" in text[: text.index("\n## ", 500)], "a table comes first"
    order = [
        "Bring your own|Write your own|of your own|Add a key",
        "Reference|All operators",
        "How it works|How the engines",
        "Files$",
    ]
    found = [
        kind
        for head in re.findall(r"^## (.+)", text, re.M)
        for kind, names in enumerate(order)
        if re.search(names, head)
    ]
    assert found == sorted(found) and found.count(3) == 1


@pytest.mark.parametrize("readme", READMES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(readme: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", readme.read_text()):
        assert "://" in target or (readme.parent / target).exists(), target


@pytest.mark.parametrize("readme", READMES, ids=lambda path: str(path.relative_to(ROOT)))
def test_examples_of_configs_are_yaml(readme: Path) -> None:
    for block in re.findall(r"```yaml\n(.*?)```", readme.read_text(), re.DOTALL):
        assert isinstance(yaml.safe_load(block), dict), block


def commands(text: str) -> list[list[str]]:
    """The arguments of each ``rayrft`` in the shell blocks of a text."""
    found = []
    for line in "\n".join(re.findall(r"```bash\n(.*?)```", text, re.DOTALL)).replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while "rayrft" in words:
            after = words[words.index("rayrft") + 1 :]
            words = after[after.index("&") :] if "&" in after else []
            found.append(after[: len(after) - len(words)])
    return found


def parsed(arguments: list[str]) -> dict[str, Any]:
    """The values of a command line's options, as its own parser reads them."""
    command, rest = typer.main.get_command(app), [*arguments]
    while hasattr(command, "commands"):
        command = command.commands[rest.pop(0)]
    return command.make_context(" ".join(arguments), rest).params


@pytest.mark.parametrize("readme", READMES, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_are_those_of_the_command_line(readme: Path) -> None:
    for arguments in commands(readme.read_text()):
        parsed(arguments)


def test_the_commands_of_the_readme_name_files_and_keys_that_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``my.yaml`` is the config that the page shows."""
    text = READMES[0].read_text()
    [mine, *_] = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    (tmp_path / "my.yaml").write_text(mine)
    (tmp_path / "jobs").symlink_to(ROOT / "jobs")
    monkeypatch.chdir(tmp_path)
    block = text.partition("## Commands")[2].partition("## ")[0]
    found = commands(block)
    assert len(found) == len(re.findall(r"^\w", re.findall(r"```bash\n(.*?)```", block, re.DOTALL)[0], re.M))
    for arguments in found:
        [config] = [word for word in arguments if word.endswith(".yaml")] or ["my.yaml"]
        overrides = [word for word in arguments if re.match(r"[\w.]+=", word) and arguments[0] != "bench"]
        change = change_config if arguments[0] == "set" else load_config
        assert change(load_config(config), dict(map(parse_override, overrides)))


async def test_the_examples_of_a_reward_and_a_workflow_run(tiny_model: Path) -> None:
    found = [block for readme in READMES for block in examples(readme)]
    for block in found:
        exec(compile(block, "README", "exec"), {})
    workflows = [name for block in found for name in re.findall(r'register_workflow\("(\w+)"\)', block)]
    rewards = [name for block in found for name in re.findall(r'register_reward\("(\w+)"\)', block)]
    assert len(workflows) >= 3 and len(rewards) >= 3

    async def score(task: Task, transcripts: list[Transcript]) -> list[RewardResult]:
        return [RewardResult(1.0)] * len(transcripts)

    for name in workflows:
        settings: dict[str, Any] = {"explorer.workflow": name}
        if name == "in_environment":
            settings["explorer.environment.name"] = "counting"
        rollout = await Runner(config(**settings), ChatTokenizer(tiny_model), Engines(), score).run(TASK, "g", 2, 1.0)
        assert len(rollout.rows) == 2 and not rollout.failed
        assert [turn["role"] for turn in rollout.rows[0].turns] == ["user", "assistant", "user", "assistant"]
    for name in rewards:
        results = [
            await score_one(build_reward(name, {}), TASK, Transcript.of(TASK, said)) for said in ("it is esroh", "no")
        ]
        assert [result.value for result in results] == [1.0, 0.0]


LEARNS = """
import sys

import numpy as np
import torch

exec(sys.stdin.read())
from rayrft.algorithms import Denominators, build
from rayrft.buffer.samplers import Candidates, samplers
from rayrft.config.buffer import SamplerConfig
from tests.algorithms.flat import leaf, make_batch, output

loss = build("grpo", {"policy_loss": "scaled", "factor": 0.5}).loss
found = loss(output(leaf([[-1.0], [-1.0]])), make_batch([[-1.0], [-1.0]], [[1.0], [3.0]]), Denominators(2, 2))
print(round(found.loss.item(), 6))
slots = np.array([3, 5, 8])
groups = Candidates(slots, np.array([2, 0, 1]), np.ones(3), np.zeros(3, int), np.zeros(3, int))
drawn = samplers.get("newest")(groups, 2, 0, SamplerConfig(name="newest"), np.random.default_rng(0))
print(sorted(drawn.slots.tolist()))
"""


def test_the_examples_of_a_loss_and_a_sampler_run() -> None:
    """In a process of its own: other tests list the registries."""
    rooms = [ROOT / "rayrft" / room / "README.md" for room in ("algorithms", "buffer")]
    code = "\n".join(block for room in rooms for block in examples(room))
    done = subprocess.run([sys.executable, "-c", LEARNS], cwd=ROOT, input=code, capture_output=True, text=True)
    assert done.stdout.split("\n")[:2] == ["-1.0", "[3, 8]"], done.stderr
