"""What can be found wrong before actors start: data, model, tokenizer, reward; and what the actors start with."""

from __future__ import annotations

import datetime
import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from rayrft.buffer.demonstrations import from_file, from_tasks
from rayrft.buffer.experience import Experience, Task
from rayrft.buffer.tasksets import TaskSplits, load_tasks
from rayrft.buffer.tokens import ChatTokenizer
from rayrft.config import RunConfig, dump_config
from rayrft.config.data import RewardConfig
from rayrft.errors import ConfigError, DataError, ModelError
from rayrft.explorer.workflow import workflows
from rayrft.rewards import build_reward


@dataclass(frozen=True)
class Prepared:
    """Checked and loaded: what the actors are started with."""

    model: str
    tasks: list[Task]
    held_out: list[Task]
    demonstrations: dict[str, list[Experience]]
    left_out: dict[str, Counter[str]] = field(default_factory=dict)
    """Demonstrations left out, by name and reason."""


def prepare(config: RunConfig) -> Prepared:
    """Load and check everything a run reads, and open its folder.

    Raises DataError, ModelError or ConfigError. Needs a running Ray only for tasks from files.
    """
    workflows.get(config.explorer.workflow, "explorer.workflow")
    splits = load_tasks(config.tasks, config.demonstrations, config.seed)
    _check_reward(config.reward, splits.train[0])
    _check_files(config)
    open_folder(config)
    model = _model(config, splits)
    tokenizer = ChatTokenizer(model)
    _check_prompts(config, splits.train, tokenizer)
    held_out = {task.question for task in splits.evaluation}
    demonstrations, left_out = {}, {}
    for name, each in config.demonstrations.items():
        if each.path is None:
            demonstrations[name] = from_tasks(name, splits.demonstrated[name], each, tokenizer, config.seed)
        else:
            demonstrations[name], left_out[name] = from_file(name, each, tokenizer, config.model.max_length, held_out)
    return Prepared(model, splits.train, splits.evaluation, demonstrations, left_out)


def open_folder(config: RunConfig) -> None:
    """Make the run folder and write ``config.yaml``. An older run of that name is kept under its end's date."""
    folder = config.folder
    if folder.exists():
        ended = datetime.datetime.fromtimestamp(folder.stat().st_mtime)
        folder.rename(folder.with_name(f"{folder.name}.{ended:%Y%m%d-%H%M%S}"))
    try:
        (folder / "checkpoints").mkdir(parents=True)
        (folder / "config.yaml").write_text(dump_config(config))
    except OSError as error:
        raise ConfigError(f"cannot be written: {error.strerror}", field="storage", value=str(folder)) from None


def _model(config: RunConfig, splits: TaskSplits) -> str:
    """Path or hub id of the model; a tiny one is made first."""
    if config.model.tiny is not None:
        from rayrft.trainer.tiny import make_tiny_model

        tasks = [
            *splits.train,
            *splits.evaluation,
            *(task for part in splits.demonstrated.values() for task in part),
        ]
        prompts = [message["content"] for task in tasks for message in task.messages]
        folder = config.folder / "model"
        make_tiny_model(
            config.model.tiny,
            prompts,
            [task.answer for task in tasks] + _demonstrated_text(config),
            folder,
            max_length=config.model.max_length,
            seed=config.seed,
        )
        return str(folder)
    path = str(config.model.path)
    if Path(path).is_dir():
        if not (Path(path) / "config.json").is_file():
            raise ModelError("the folder holds no model (no config.json)", field="model.path", value=path)
        return str(Path(path).absolute())
    from transformers import AutoConfig

    try:
        AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"no such model: {str(error).strip().splitlines()[0]}",
            field="model.path",
            value=path,
            remedy="give a folder in Hugging Face format, or the id of a model on the hub",
        ) from None
    return path


def _demonstrated_text(config: RunConfig) -> list[str]:
    """Text of demonstration files, so that a tiny model's tokenizer knows their characters."""
    return [
        each.path.read_text() for each in config.demonstrations.values() if each.path and each.path.suffix == ".jsonl"
    ]


def _check_files(config: RunConfig) -> None:
    for name, each in config.demonstrations.items():
        if each.path is not None and not each.path.is_file():
            raise DataError("no such file", field=f"demonstrations.{name}.path", value=str(each.path))


def _check_reward(config: RewardConfig, task: Task) -> None:
    """Score one right answer, so that a reward that cannot work is known now and not after a hundred groups."""
    reward = build_reward(config.name, config.options)
    try:
        reward(task, task.answer)
    except Exception as error:  # user code may raise anything
        raise ConfigError(
            f"the reward raised {type(error).__name__}: {error} on the answer of the first task",
            field="reward.name",
            value=config.name,
            remedy=f"mend it; the task was {json.dumps(task.question)[:80]}",
        ) from None


def _check_prompts(config: RunConfig, tasks: list[Task], tokenizer: ChatTokenizer) -> None:
    limit = config.explorer.sampling.max_prompt_tokens
    lengths = [len(tokenizer.prompt(task.messages)) for task in tasks[:200]]
    if min(lengths) > limit:
        raise DataError(
            f"every prompt is longer than the limit of {limit} tokens (shortest of {len(lengths)}: {min(lengths)})",
            field="explorer.sampling.max_prompt_tokens",
            value=limit,
            remedy="raise it, and model.max_length with it",
        )
