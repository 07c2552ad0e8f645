"""Checks before a run starts: loads models, tasks, demonstrations and rewards, and opens the run folder."""

from __future__ import annotations

import datetime
import json
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, islice, repeat, zip_longest
from pathlib import Path

from rayrft.buffer.log.storage import Storage
from rayrft.buffer.samplers import samplers
from rayrft.buffer.scores import scores
from rayrft.buffer.validation import Limits
from rayrft.config import RunConfig, dump_config
from rayrft.config.explorer import ExplorerConfig
from rayrft.config.load import plugin_copy
from rayrft.config.serve import HttpConfig
from rayrft.core.reward_checks import check_classifier, check_rewards
from rayrft.data.demonstrations import demonstrate, from_file, from_tasks, held_out_name, hold_out
from rayrft.data.formats import conversations, read_rows
from rayrft.data.task_sampler import TaskSetSpec
from rayrft.data.task_splits import TaskSplits
from rayrft.data.tokenizer import ChatTokenizer
from rayrft.errors import ConfigError, DataError, ModelError
from rayrft.experience import Experience, Task
from rayrft.explorer.environments import environment_factory
from rayrft.explorer.workflows import Workflow, build_workflow
from rayrft.files import atomic_file
from rayrft.pipelines.experiences import check_experiences
from rayrft.pipelines.report import OperatorReport
from rayrft.pipelines.run.answering import Engines
from rayrft.pipelines.tasks import load_processed
from rayrft.runtime.serving import key_digest
from rayrft.trainer.batch_pipeline import check_batches

_TASKS = "tasks.json"
"""The ids of a run's tasks in their order, in its folder."""
_PROBES = [Task.create("probe", question, "12") for question in ("How much is 5 + 7?", "And 15 - 3?")]
"""What engines and trainer are compared on if there are no tasks."""


def find_model(path: str, field: str) -> str:
    """Return a model folder as an absolute path, or a hub id unchanged. Raises ModelError for ``field`` if neither
    exists."""
    if Path(path).is_dir():
        if not (Path(path) / "config.json").is_file():
            raise ModelError(
                "the folder contains no model (no config.json)",
                "give a folder in Hugging Face format, or the id of a model on the hub",
                field=field,
                value=path,
            )
        return str(Path(path).absolute())
    from transformers import AutoConfig

    try:
        AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"no such model: {str(error).strip().splitlines()[0]}",
            "give a folder in Hugging Face format, or the id of a model on the hub",
            field=field,
            value=path,
        ) from None
    return path


def vocabulary_of(model: str) -> int:
    """Return the vocabulary size of the model's head."""
    from transformers import AutoConfig

    size: int = AutoConfig.from_pretrained(model).get_text_config().vocab_size
    return size


def check_teacher(path: str, field: str, model: str, tokenizer: ChatTokenizer) -> None:
    """Raise ModelError for ``field`` unless teacher and policy share a tokenizer, as they are compared per token."""
    find_model(path, field)
    theirs, ours = ChatTokenizer(path, field).hf.get_vocab(), tokenizer.hf.get_vocab()
    different = next((token for token, index in ours.items() if theirs.get(token) != index), None)
    if different is not None:
        raise ModelError(
            f"the teacher's tokenizer is not the model's: token {different!r} has id {ours[different]} in the model's "
            f"and {theirs.get(different)} in the teacher's",
            "choose a teacher of the same model family, with the same tokenizer",
            field=field,
            value=path,
        )
    size, needed = vocabulary_of(path), vocabulary_of(model)
    if size < needed:
        raise ModelError(
            f"the teacher has a vocabulary of {size}, and the model, of {needed}, may sample tokens beyond it",
            "choose a teacher whose vocab_size is at least the model's",
            field=field,
            value=path,
        )


@dataclass(frozen=True)
class Prepared:
    """Checked and loaded inputs that the actors are started with."""

    run_id: str
    """Unique id, which tells this run from others of its name, such as one whose log is in the same folder."""
    model: str
    tasks: list[Task]
    task_set: TaskSetSpec | None
    """Factory of the task set that draws from ``tasks``, if there are any."""
    held_out: list[Task]
    demonstrations: dict[str, list[Experience]]
    limits: Limits
    """Limits of its model on rows."""
    probe: list[Experience]
    """Rows on which engine and trainer must agree: questions with images and answers, held-out ones first."""
    left_out: dict[str, Counter[str]] = field(default_factory=dict)
    """Counts of skipped demonstrations by name and reason."""
    notices: tuple[str, ...] = ()
    """What its rewards say of how they score."""
    tokenizer: str = ""
    """Digest of its tokenizer."""
    key_digests: tuple[str, ...] = ()
    """Those of the endpoint's API keys."""
    drop_equal: bool = False
    """Whether nothing can be learnt from a group of sessions with equal rewards."""
    task_reports: list[OperatorReport] = field(default_factory=list)
    """What was done with the tasks, by operator."""


def prepare(config: RunConfig, run_id: str, *, resumed: bool = False, engines: Engines | None = None) -> Prepared:
    """Load and check everything a run reads, and create its folder; the folder of a ``resumed`` run is kept.
    ``engines`` has the auxiliary models that operators on its tasks ask.

    Raises DataError, ModelError or ConfigError. Requires a running Ray only for tasks from files.
    """
    check_auxiliary(config)
    samplers.get(config.buffer.sampler.name, "buffer.sampler.name")
    scores.get(config.buffer.sampler.score, "buffer.sampler.score")
    processed, notices = load_processed(config, engines), list[str]()
    splits = processed.splits
    if config.tasks is not None:
        others = chain(splits.evaluation, *splits.demonstrated.values())
        by_source = chain(zip(splits.train, splits.sources, strict=True), zip(others, repeat(-1)))
        notices = check_rewards(config.reward, by_source, config.auxiliary)
    check_experiences(config, config.model.path)
    if config.pipelines.batch:
        check_batches(config, config.model.path)
    built = check_workflows(config.explorer, _all_tasks(splits), config.auxiliary)
    _check_files(config)
    if resumed:
        _check_same_tasks(config.folder / _TASKS, splits)
    else:
        open_folder(config, json.dumps(_task_ids(splits)))
        if config.buffer.name is None:
            _check_log(config)
    model = _model(config, splits)
    tokenizer = ChatTokenizer(model, template=config.model.template)
    for number, stage in enumerate(config.stages):
        if stage.teacher is not None:
            check_teacher(stage.teacher, f"stages.{number}.teacher", model, tokenizer)
        if stage.trains_reward_model:
            check_classifier(model, stage.name)
    if any(task.images for task in _all_tasks(splits)):
        _ = tokenizer.images  # raises if the model does not accept images
    if config.rolls_out and splits.train and config.explorer.environment is None:
        notices += _check_prompts(config, splits.train, tokenizer, built)
    held_out = {task.dedup_key for task in splits.evaluation}
    demonstrations, left_out, max_length = {}, {}, config.model.max_length
    for name, spec in config.demonstrations.items():
        if spec.path is None:
            rows = from_tasks(name, splits.demonstrated[name], spec, tokenizer, config.seed)
            demonstrations[name], left_out[name] = _short_enough(name, rows, max_length)
        else:
            whole, labelled = name in config.scored_demonstrations, name in config.labelled_demonstrations
            demonstrations[name], report = from_file(
                name, spec, tokenizer, max_length, held_out, whole=whole, labelled=labelled
            )
            left_out[name] = report.counts
        if spec.held_out:
            rows, held = hold_out(name, demonstrations[name], spec.held_out, config.seed)
            demonstrations[name], demonstrations[held_out_name(name)] = rows, held
            left_out[name]["held out, in pairs"] = len(held) // 2
    compared = chain(splits.evaluation, splits.train, _PROBES) if config.rolls_out else []
    probe = choose_probe(compared, tokenizer, config.model.max_length)
    task_set = task_set_spec(config, splits)
    limits = Limits(vocabulary_of(model), max_length)
    keys = read_keys(config.endpoint) if config.endpoint is not None else ()
    learns = [stage.algorithm.build() for stage in config.stages if stage.groups]
    return Prepared(
        run_id,
        model,
        splits.train,
        task_set,
        splits.evaluation,
        demonstrations,
        limits,
        probe,
        left_out,
        tuple(notices),
        tokenizer.digest,
        keys,
        config.explorer.drop_zero_variance and all(algorithm.zero_advantage_is_noop for algorithm in learns),
        processed.reports,
    )


def read_keys(config: HttpConfig) -> tuple[str, ...]:
    """Return the digests of a server's API keys. Raises ConfigError if they are not where the config says."""
    keys = list[str]()
    if config.keys_file is not None:
        try:
            keys += config.keys_file.read_text().splitlines()
        except OSError as error:
            raise _no_keys("keys_file", f"cannot be read: {error.strerror}", str(config.keys_file)) from None
    if config.keys_env is not None:
        keys += os.environ.get(config.keys_env, "").split(",")
    keys = [key.strip() for key in keys if key.strip()]
    if not keys and (config.keys_file or config.keys_env):
        field = "keys_file" if config.keys_file else "keys_env"
        raise _no_keys(field, "has no key", str(config.keys_file or config.keys_env))
    return tuple(map(key_digest, keys))


def _no_keys(field: str, problem: str, value: str) -> ConfigError:
    return ConfigError(problem, "put the API keys there", field=f"serve.{field}", value=value)


def _short_enough(name: str, rows: list[Experience], max_length: int) -> tuple[list[Experience], Counter[str]]:
    """Return the demonstrations of up to ``max_length`` tokens, and counts of the skipped ones."""
    short = [row for row in rows if len(row.token_ids) <= max_length]
    if not short:
        raise DataError(
            f"every demonstration has more than {max_length} tokens",
            "raise model.max_length",
            field=f"demonstrations.{name}",
            value=min(len(row.token_ids) for row in rows),
        )
    return short, Counter({"too long": len(rows) - len(short)} if len(rows) > len(short) else {})


def open_folder(config: RunConfig, tasks: str = "{}") -> None:
    """Create the run folder and write ``config.yaml`` and ``tasks.json``. The folder of an older run of that name is
    renamed by the date of its end."""
    folder = config.folder
    try:
        if folder.exists():
            ended = datetime.datetime.fromtimestamp(folder.stat().st_mtime)
            folder.rename(folder.with_name(f"{folder.name}-{ended:%Y%m%d-%H%M%S}"))
        (folder / "checkpoints").mkdir(parents=True)
        (folder / _TASKS).write_text(tasks)
    except OSError as error:
        raise _unwritable(folder, error) from None
    write_config(config)


def write_config(config: RunConfig) -> None:
    """Write ``config.yaml`` atomically, and copies of the plug-ins for `read_config` to find if they are moved."""
    kept = config.folder / "plugins"
    try:
        with atomic_file(config.folder / "config.yaml") as draft:
            draft.write_text(dump_config(config))
        copies = {plugin_copy(kept, number, path): path.read_bytes() for number, path in enumerate(config.plugins)}
        for path in {*kept.glob("*")} - copies.keys():
            path.unlink()
        for path, source in copies.items():
            kept.mkdir(exist_ok=True)
            path.write_bytes(source)
    except OSError as error:
        raise _unwritable(config.folder, error) from None


def _unwritable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot be written: {error.strerror}",
        "choose another storage, or fix its permissions",
        field="storage",
        value=str(folder),
    )


def task_set_spec(config: RunConfig, splits: TaskSplits) -> TaskSetSpec | None:
    """Return what makes the task set of a run, if it has tasks. Raises the errors of `TaskSet`."""
    tasks = config.tasks
    if tasks is None:
        return None
    make = TaskSetSpec(
        [task.id for task in splits.train],
        splits.sources,
        [source.weight for source in tasks.sources],
        sampler=tasks.sampler,
        seed=config.seed,
        epochs=tasks.epochs,
        difficulties=[task.difficulty for task in splits.train],
        priorities=[task.priority for task in splits.train],
        tried=[(task.id, task.tries, task.passes) for task in splits.train if task.tries],
    )
    make()  # raises if the sampler is unsuitable for these tasks
    return make


def _task_ids(splits: TaskSplits) -> dict[str, list[str]]:
    parts = {"training": splits.train, "held-out": splits.evaluation, **splits.demonstrated}
    return {name: [task.id for task in tasks] for name, tasks in parts.items()}


def _check_same_tasks(file: Path, splits: TaskSplits) -> None:
    """Raise DataError at the first task that is not the one of its place when the run was started: draws, statistics
    and what is held out go by places."""
    try:
        before = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"cannot be read: {error}", "start a new run", field="run", value=str(file)) from None
    now, questions = _task_ids(splits), {task.id: task.question[:60] for task in _all_tasks(splits)}
    for name in [*before, *now]:
        for number, (old, new) in enumerate(zip_longest(before.get(name, []), now.get(name, [])), start=1):
            if old != new:
                same = sorted(chain(*before.values())) == sorted(chain(*now.values()))
                change = "the same tasks are in another order" if same else "the tasks are others"
                raise DataError(
                    f"{change} than when the run was started: {name} task {number} was {old} and is {new} "
                    f"({questions.get(new)!r})",
                    "give the tasks that the run was started with, in their order, or start a new run",
                    field="tasks.sources",
                )


def _check_log(config: RunConfig) -> None:
    """Raise unless the Buffer's storage is writable and holds no other run's log."""
    storage = Storage(config.buffer_folder)
    if any(name.startswith(("journal", "snapshot")) for name in storage.files()):
        raise ConfigError(
            "the folder contains the log of an earlier run",
            "choose another name or buffer.storage, or move the old log away",
            field="buffer.storage",
            value=str(config.buffer_folder),
        )
    storage.create()
    storage.write("writable", b"")
    storage.delete("writable")


def _model(config: RunConfig, splits: TaskSplits) -> str:
    """Return the path or hub id of the model; create it first if it is a tiny one."""
    if config.model.tiny is not None:
        from rayrft.trainer.tiny import make_tiny_model
        from rayrft.trainer.tiny_vision import make_tiny_vision_model

        tasks = list(_all_tasks(splits))
        prompts = [message["content"] for task in tasks for message in task.messages]
        folder = config.folder / "model"
        if folder.exists():  # of a run that is resumed
            return str(folder)
        make = make_tiny_vision_model if config.model.tiny.vision else make_tiny_model
        make(
            config.model.tiny,
            prompts,
            [task.answer for task in tasks] + _demonstrated_text(config),
            folder,
            max_length=config.model.max_length,
            seed=config.seed,
        )
        return str(folder)
    return find_model(str(config.model.path), "model.path")


def choose_probe(tasks: Iterable[Task], tokenizer: ChatTokenizer, max_length: int) -> list[Experience]:
    """Return the first eight tasks as rows shorter than ``max_length``: scoring takes an engine one more token."""
    rows = (demonstrate("", task, task.answer, tokenizer) for task in tasks)
    return list(islice((row for row in rows if len(row.token_ids) < max_length), 8))


def _all_tasks(splits: TaskSplits) -> Iterator[Task]:
    return chain(splits.train, splits.evaluation, *splits.demonstrated.values())


def _demonstrated_text(config: RunConfig) -> list[str]:
    """Return the text of demonstration files, so that a tiny model's tokenizer knows their characters."""
    texts: list[str] = []
    for name, spec in config.demonstrations.items():
        rows = read_rows(spec.path, f"demonstrations.{name}.path") if spec.path is not None else ()
        for _, row in rows:
            with suppress(DataError):  # broken rows are reported when they become experiences
                conversation = conversations(row, spec) if isinstance(row, dict) else []
                texts += [message["content"] for _, messages in conversation for message in messages]
    return texts


def _check_files(config: RunConfig) -> None:
    """Read the first row of every demonstration file; raises DataError if one cannot be read."""
    for name, spec in config.demonstrations.items():
        if spec.path is not None:
            next(read_rows(spec.path, f"demonstrations.{name}.path"), None)


def check_auxiliary(config: RunConfig) -> None:
    """Raise ModelError unless every auxiliary model is there, with its tokenizer."""
    for name, auxiliary in config.auxiliary.items():
        field = f"auxiliary.{name}.model"
        ChatTokenizer(find_model(auxiliary.model, field), field, auxiliary.template)


def check_workflows(
    config: ExplorerConfig, tasks: Iterable[Task], auxiliary: Collection[str] = ()
) -> dict[str | None, Workflow]:
    """Return the config's workflow (None) and those that tasks name. Raises ConfigError unless they and the environment
    can be built."""
    built: dict[str | None, Workflow] = {None: build_workflow(config.workflow, config, auxiliary=auxiliary)}
    if config.environment is not None:
        environment_factory(config.environment)
    for name in {task.workflow for task in tasks if task.workflow}:
        built[name] = build_workflow(name, config, "workflow of a task", auxiliary=auxiliary)
    return built


def _check_prompts(
    config: RunConfig, tasks: list[Task], tokenizer: ChatTokenizer, built: Mapping[str | None, Workflow]
) -> list[str]:
    """Measure first prompts; return a notice if some are too long. Raises DataError if all are, or the chat template
    refuses one."""
    limit = config.explorer.sampling.max_prompt_tokens

    def length(task: Task) -> int:
        opening = getattr(built[task.workflow or None], "opening", None)
        messages, tools = opening(task, tokenizer) if opening is not None else (task.messages, ())
        try:
            return len(tokenizer.prompt(messages, task.images, tools))
        except DataError as error:
            raise DataError(error.problem, error.remedy, field="tasks", value=task.id) from None

    # Sampled over all tasks: a file may be sorted by length, and sources follow one another.
    lengths = [length(task) for task in tasks[:: max(1, len(tasks) // 200)]]
    if min(lengths) > limit:
        raise DataError(
            f"every prompt is longer than the limit of {limit} tokens (shortest of {len(lengths)}: {min(lengths)})",
            "raise it, and model.max_length with it",
            field="explorer.sampling.max_prompt_tokens",
            value=limit,
        )
    long = sum(each > limit for each in lengths)
    return [f"{long} of {len(lengths)} prompts are longer than {limit} tokens: such tasks are dropped"] if long else []
