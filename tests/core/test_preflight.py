"""What a run is started with."""

from __future__ import annotations

import json
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from rayrft.config import RunConfig, load_config
from rayrft.config.base import Section
from rayrft.config.reward import RewardConfig
from rayrft.core.preflight import PreparedRun, prepare
from rayrft.data.inputs import choose_probe
from rayrft.data.tokenizer import ChatTokenizer
from rayrft.errors import ConfigError, DataError
from rayrft.experience import Task
from rayrft.rewards.checks import check_rewards
from tests.conftest import ROOT
from tests.e2e.conftest import small_config
from tests.errors import about


def test_the_probe_is_of_sequences_that_leave_an_engine_room_for_a_token(tiny_model: Path) -> None:
    tokenizer = ChatTokenizer(str(tiny_model))
    tasks = [Task.create("test", f"Spell this word backward: {'cat' * times}", "tac" * times) for times in (4, 1, 2, 3)]
    lengths = [len(tokenizer.prompt(task.messages) + tokenizer.response(task.answer)) for task in tasks]
    chosen = choose_probe(tasks, tokenizer, max_length=lengths[3])
    assert [row.task_id for row in chosen] == [tasks[1].id, tasks[2].id]
    assert len(choose_probe(tasks * 3, tokenizer, max_length=1000)) == 8


ROWS = [json.dumps({"question": f"{n} + 1?", "answer": str(n + 1)}) for n in range(20)]


def start(model: Path, folder: Path, lines: list[str], *, resumed: bool = False, **overrides: Any) -> PreparedRun:
    """Prepare a run on a file of these lines."""
    folder.mkdir(exist_ok=True)
    path = folder / "tasks.jsonl"
    path.write_text("\n".join(lines))
    grpo = {"name": "grpo", "algorithm": {"name": "grpo"}, "steps": 1, "batch_size": 4, "group_size": 2}
    tasks = {"sources": [{"source": "file", "path": str(path)}], "eval_size": 4}
    changes = {"model": {"path": str(model), "max_length": 500}, "tasks": tasks, "demonstrations": {}, "stages": [grpo]}
    return prepare(load_config(small_config(folder, "run", **changes), overrides), "run", resumed=resumed)


def test_a_resume_on_tasks_in_another_order_names_the_first_that_differs(tiny_model: Path, tmp_path: Path) -> None:
    first = start(tiny_model, tmp_path, ROWS)
    again = start(tiny_model, tmp_path, ROWS, resumed=True)
    assert [task.id for task in again.held_out] == [task.id for task in first.held_out]
    with pytest.raises(DataError, match="the same tasks are in another order", check=about("tasks.sources")) as caught:
        start(tiny_model, tmp_path, ROWS[::-1], resumed=True)
    assert f"training task 1 was {first.tasks[0].id} and is " in caught.value.problem
    with pytest.raises(DataError, match=r"the tasks differ .* \('new'\)", check=about("tasks.sources")):
        start(tiny_model, tmp_path, [json.dumps({"question": "new", "answer": "1"}), *ROWS[1:]], resumed=True)


ON_GPUS = {"explorer.engine.gpus": 1, "trainer.gpus": 1}
HELPER = {"auxiliary.judge.engine.gpus": 1, "auxiliary.judge.engine.count": 1}


@pytest.mark.parametrize(
    ("overrides", "slow"),
    [
        ({"model.dtype": "float32"}, []),
        ({"model.dtype": "float32", **ON_GPUS}, ["model.dtype"]),
        ({"model.dtype": "bfloat16", **ON_GPUS}, []),
        ({"model.dtype": "float32", **HELPER, "auxiliary.judge.dtype": "float32"}, ["auxiliary.judge.dtype"]),
        ({"model.dtype": "bfloat16", **ON_GPUS, **HELPER, "auxiliary.judge.dtype": "bfloat16"}, []),
    ],
)
def test_float32_on_gpus_is_a_notice(
    overrides: dict[str, Any], slow: list[str], tiny_model: Path, tmp_path: Path
) -> None:
    judge = {"auxiliary.judge.model": str(tiny_model)} if any("judge" in key for key in overrides) else {}
    notices = start(tiny_model, tmp_path, ROWS, **overrides, **judge).notices
    assert [line.split()[0] for line in notices if "float32 on GPUs" in line] == slow


def add(one: int, two: int) -> int:
    """Add two numbers."""
    return one + two


def test_a_package_that_is_missing_is_asked_for_before_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = load_config(ROOT / "jobs" / "quickstart.yaml", {"storage": tmp_path, "trainer.moments": "8bit"})
    with pytest.raises(ConfigError, match=r"trainer\.moments: needs a package that is not installed: torchao"):
        prepare(config, "run")


def test_prompts_are_measured_as_the_workflow_sends_them(tiny_model: Path, tmp_path: Path) -> None:
    rows = [*ROWS[:10], *(json.dumps({"question": "x" * 60 + str(n), "answer": "x"}) for n in range(10))]
    limit = {"explorer.sampling.max_prompt_tokens": 40}
    [notice] = start(tiny_model, tmp_path / "some", rows, **limit).notices
    assert "of 16 prompts are longer than 40 tokens" in notice
    assert not start(tiny_model, tmp_path / "none", ROWS, **limit).notices
    tools = {"explorer.workflow": "tool_calling", "explorer.workflow_options.tool_calling.tools": [f"{__name__}:add"]}
    with pytest.raises(DataError, match="every prompt is longer", check=about("explorer.sampling.max_prompt_tokens")):
        start(tiny_model, tmp_path / "all", ROWS, **limit, **tools)


def test_a_task_that_the_chat_template_refuses_is_named(tiny_model: Path, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% if '1?' in messages[0].content %}{{ raise_exception('no sums') }}{% endif %}> ")
    with pytest.raises(DataError, match="the chat template") as refused:
        start(tiny_model, tmp_path / "run", ROWS, **{"model.template.file": str(template)})
    assert refused.value.field == "tasks" and refused.value.value


def test_reasoning_in_a_form_that_is_not_read_is_a_notice(tiny_model: Path, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}> {{ m.content }}{% endfor %}{# Here is my thought process: #}")
    [notice] = start(tiny_model, tmp_path / "run", ROWS, **{"model.template.file": str(template)}).notices
    assert "granite" in notice and notice.startswith("model.path")


BUILT: Counter[str] = Counter()
SCORED: list[str] = []


class OfOneArgument:
    """A reward in the event loop with a wrong signature."""

    async def score(self, task: Task) -> float:
        return 1.0


class Telling:
    """Says how it scores, and what it needs."""

    def __init__(self, name: str = "a", longest_s: float = 1.0) -> None:
        BUILT[name] += 1
        self.notice, self.longest_s, self.needs_auxiliary = f"{name} scores", longest_s, ("grader",)

    def __call__(self, task: Task, response: str) -> float:
        SCORED.append(task.question)
        return 1.0


def test_each_reward_is_built_once_tried_on_every_source_and_says_how_it_scores_before_the_run_starts() -> None:
    BUILT.clear()
    SCORED.clear()
    name = f"{__name__}:Telling"
    config = RewardConfig(domains={d: {"name": name, "options": {"name": d}} for d in "ab"})  # type: ignore[dict-item]
    numbers = [(domain, number) for domain in "ab" for number in range(4)]
    tasks = [(Task.create("t", f"{domain}{n}", "x", domain=domain), n // 2) for domain, n in numbers]
    assert check_rewards(config, tasks, ["grader"]) == [f"reward {name!r}: {domain} scores" for domain in "ab"]
    assert BUILT == {"a": 1, "b": 1} and SCORED == ["a0", "a2", "b0", "b2"]


@pytest.mark.parametrize(
    ("settings", "auxiliary", "domain", "field"),
    [
        ({"options": {"longest_s": 10.0}}, ["grader"], "a", "reward.deadline_s"),
        ({}, [], "a", "auxiliary"),
        ({}, ["grader"], "c", "reward.domains"),
        ({"name": f"{__name__}:OfOneArgument"}, [], "a", "reward.name"),
    ],
)
def test_what_a_reward_lacks_is_named(settings: dict[str, Any], auxiliary: list[str], domain: str, field: str) -> None:
    config = RewardConfig(domains={"a": {"name": f"{__name__}:Telling", **settings}})  # type: ignore[dict-item]
    with pytest.raises(ConfigError, check=about(field)):
        check_rewards(config, [(Task.create("t", "question", "x", domain=domain), 0)], auxiliary)


class Own:
    """A reward of one's own, which gives ``value``; ``accepts_truth`` is its attribute, if it has one."""

    def __init__(self, value: Any, **attributes: bool) -> None:
        self._value = value
        vars(self).update(attributes)

    def __call__(self, task: Task, response: str) -> Any:
        return self._value


def scored(reward: str, answers: list[str], workflow: str = "single_turn", **options: Any) -> list[str]:
    tasks = [(Task.create("t", f"question {n}", each), 0) for n, each in enumerate(answers)]
    return check_rewards(RewardConfig(name=reward, options=options), tasks, workflow=workflow)


@pytest.mark.parametrize(
    ("reward", "options", "answer", "unknown"),
    [
        ("math", {}, "as many as there were before the sale", 60),
        ("k12", {"kind": "true_false"}, "perhaps", 60),
        ("vision", {"kind": "point"}, "left", 60),
        (f"{__name__}:Own", {"value": 0.5, "accepts_truth": True}, "7", 0),
    ],
)
def test_a_reward_must_accept_some_references(reward: str, options: dict[str, Any], answer: str, unknown: int) -> None:
    with pytest.raises(ConfigError, check=about("reward.name", reward)) as caught:
        scored(reward, [answer] * 60, **options)
    assert f"60 of 60 reference answers of source 0 do not get full marks ({unknown} unknown)" in caught.value.problem
    assert [f"to 'question {number}'" in caught.value.problem for number in range(4)] == [True, True, True, False]


@pytest.mark.parametrize("reward", ["exact", "k12", "math", "vision"])
def test_a_reward_that_needs_answers_is_refused_where_no_task_has_one(reward: str) -> None:
    for workflow in ("single_turn", "tool_calling"):
        with pytest.raises(ConfigError, match="source 0 have none", check=about("reward.name", reward)):
            scored(reward, [""] * 3, workflow)
    assert scored(reward, [""] * 3, workflow="episode") == [], "the environment gives the rewards"
    assert scored("format", [""] * 3) == []


def test_reference_answers_that_do_not_get_full_marks_are_counted_and_three_are_named() -> None:
    answers = [str(number) if number % 4 else "as many as before the sale" for number in range(1000)]
    [notice] = scored("math", answers[1:], strict=True)
    assert "of 200 reference answers of source 0 do not get full marks" in notice and notice.count("'question ") == 3
    assert scored("math", ["7", "\\frac{1}{2}", "Adding gives 3. #### 3"], strict=True) == []
    assert scored("k12", ["B"] * 3, kind="choice", strict=True) == []


def test_a_reward_of_ones_own_need_not_accept_the_truth_but_must_give_a_number() -> None:
    own = f"{__name__}:Own"
    assert scored(own, ["7"] * 3, value=0.0) == []
    [notice] = scored(own, ["7"] * 3, value=float("nan"))
    assert "it is unknown for '7' to 'question 0'" in notice
    with pytest.raises(ConfigError, match="raised TypeError", check=about("reward.name", own)):
        scored(own, ["7"], value=[1.0])


def test_a_config_is_checked_by_a_list_of_calls_that_reads_top_to_bottom(tmp_path: Path) -> None:
    """The config, or a section of it, comes to few files, each function takes the whole config once, and none hands it
    back to a file of ``core``."""
    config = load_config(ROOT / "jobs" / "pipelines.yaml", {"storage": tmp_path})
    visits = list[tuple[str, str, str, bool]]()

    @cache
    def place(file: str) -> str:
        path = Path(file)
        return str(path.relative_to(ROOT / "rayrft")) if path.is_relative_to(ROOT / "rayrft") else "config/"

    def profile(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or (file := place(code.co_filename)).startswith("config/"):
            return
        given = [frame.f_locals.get(name) for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]]
        if any(isinstance(each, Section) for each in given):
            caller = frame.f_back
            while caller is not None and place(caller.f_code.co_filename).startswith("config/"):
                caller = caller.f_back
            whole = any(isinstance(each, RunConfig) for each in given)
            visits.append((file, code.co_qualname, place(caller.f_code.co_filename) if caller else "", whole))

    sys.setprofile(profile)
    try:
        prepare(config, "run")
    finally:
        sys.setprofile(None)
    assert len({file for file, *_ in visits}) <= 25
    taken = Counter((file, name) for file, name, _, whole in visits if whole)
    assert len(taken) <= 25 and {*taken.values()} == {1}, taken
    helpers = {name for file, name in taken if file == "core/preflight.py"} - {"prepare"}
    assert len(helpers) <= 4, helpers
    up = [name for file, name, caller, _ in visits if file.startswith("core/") and not caller.startswith("core/")]
    assert up == ["prepare"]
