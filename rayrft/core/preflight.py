"""Checks before a run starts: loads tasks, model, tokenizer and demonstrations once, and checks each part with them."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain

from rayrft.buffer.events import ModelTerms
from rayrft.buffer.samplers import samplers
from rayrft.buffer.scores import scores
from rayrft.buffer.validation import Limits
from rayrft.config import RunConfig
from rayrft.config.serve import read_keys
from rayrft.core.run_folder import check_log, check_same_tasks, open_folder
from rayrft.data import models
from rayrft.data.inputs import check_demonstrations, choose_probe, demonstrated_text, load_demonstrations, task_set_spec
from rayrft.data.task_sampler import TaskSetSpec
from rayrft.data.tokenizer import ChatTokenizer
from rayrft.errors import ConfigError
from rayrft.experience import Experience, Task
from rayrft.explorer.engines.arguments import check_run_options
from rayrft.explorer.tools.vllm_parsers import check_call_format, check_template
from rayrft.explorer.workflows.base import Workflow, check_prompts, check_workflows
from rayrft.explorer.workflows.tools import ToolCalling
from rayrft.monitor.sinks import check_sinks
from rayrft.pipelines.experiences import check_experiences
from rayrft.pipelines.report import summary
from rayrft.pipelines.run.models import RunEngines
from rayrft.pipelines.tasks import load_processed
from rayrft.registry import check_installed
from rayrft.rewards.checks import check_rewards
from rayrft.runtime.waits import in_thread
from rayrft.trainer.batch_pipeline import check_batches
from rayrft.weights.files import VersionFolder

_PROBES = [Task.create("probe", question, "12") for question in ("How much is 5 + 7?", "And 15 - 3?")]
"""The probe of a run without tasks."""


@dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """Checked and loaded inputs that the actors are started with."""

    run_id: str
    """Unique id, which tells this run from others of its name, such as one whose log is in the same folder."""
    model: str
    """Its folder, or its id on the hub."""
    tokenizer: Callable[[], ChatTokenizer]
    """Unpickles its tokenizer, in a fifth of the time that importing ``AutoTokenizer`` takes."""
    terms: ModelTerms
    tasks: list[Task]
    task_set: TaskSetSpec | None
    """Factory of the task set that draws from ``tasks``, if there are any."""
    held_out: list[Task]
    demonstrations: dict[str, list[Experience]]
    probe: list[Experience]
    """Rows on which engine and trainer must agree: questions with images and answers, held-out ones first."""
    notices: tuple[str, ...] = ()
    """Messages from rewards, and counts of long prompts and skipped demonstrations, shown at start."""
    key_digests: tuple[str, ...] = ()
    """Digests of the endpoint's API keys."""
    engine_share: float | None = None
    """Share of its GPU that a rollout engine takes; None: see `EngineConfig.gpu_share`."""
    attention: float = 0.0
    """See `StagePlan`."""

    @property
    def images(self) -> Iterator[str]:
        """Paths of the images of all tasks."""
        return (image for task in (*self.tasks, *self.held_out) for image in task.images)

    @property
    def limits(self) -> Limits:
        """Limits of the model on rows."""
        return Limits(self.terms.vocabulary, self.terms.max_length)


def prepare(
    config: RunConfig,
    run_id: str,
    *,
    resumed: bool = False,
    engines: RunEngines | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> PreparedRun:
    """Load and check everything a run reads, and create its folder; the folder of a ``resumed`` run is kept.

    ``engines`` has the auxiliary models for operators on its tasks; ``say`` receives what these did. Raises DataError,
    ModelError, ConfigError or StorageError. Requires a running Ray only for tasks from files.
    """
    models.check_auxiliary(config.auxiliary)
    check_run_options(config)
    samplers.get(config.buffer.sampler.name, "buffer.sampler.name")
    scores.get(config.buffer.sampler.score, "buffer.sampler.score")
    check_sinks(config)
    if config.trainer.moments == "8bit":
        check_installed("torchao", "pip install torchao, on every node", ConfigError, "trainer.moments", "8bit")
    if config.endpoint is not None:
        check_call_format(config.endpoint.tool_calls, "serve.tool_calls")
    keys = read_keys(config.endpoint) if config.endpoint is not None else ()

    processed = load_processed(config, engines)
    splits, tasks = processed.splits, processed.splits.all
    for line in summary(processed.reports):
        say(f"tasks: {line}")
    sources = [*splits.sources, *[-1] * (len(tasks) - len(splits.train))]
    sourced, workflow = zip(tasks, sources, strict=True), config.explorer.workflow
    notices = check_rewards(config.reward, sourced, config.auxiliary, workflow)
    check_experiences(config, config.model.path)
    check_batches(config, config.model.path)
    workflows = check_workflows(config.explorer, tasks, config.auxiliary, config.plugins)
    check_demonstrations(config)
    task_set = task_set_spec(config, splits)

    if resumed:
        check_same_tasks(config, splits)
    else:
        open_folder(config, splits)
        if config.buffer.name is None:
            check_log(config)
    if config.trains and config.rolls_out and (options := config.transport_options):
        VersionFolder(options["address"]).serials()  # raises if it is not accessible

    model = _model(config, tasks)
    tokenizer = ChatTokenizer(model, template=config.model.template)
    _ = tokenizer.stop_ids  # read before the tokenizer is pickled: it takes an import, too
    vocabulary, max_length = models.vocabulary_of(model), config.model.max_length
    models.check_length(model, max_length, "model.max_length")
    if config.rolls_out:
        models.check_cache(model, max_length, config.model.dtype, config.explorer.engine, "explorer.engine")
    if any(task.images for task in tasks):
        _ = tokenizer.images  # raises ModelError if the model takes none
    for stage in config.stages:
        if stage.teacher is not None:
            models.check_teacher(stage.teacher, f"stages.{stage.name}.teacher", tokenizer, vocabulary)
        if stage.trains_reward_model:
            models.check_classifier(model, stage.name)
    if config.rolls_out and splits.train and config.explorer.environment is None:
        notices += check_prompts(splits.train, tokenizer, workflows, config.explorer.sampling.max_prompt_tokens)
    notices += _check_calls(config, workflows, tokenizer)
    if config.rolls_out and (form := tokenizer.template.unread_reasoning):
        notices += [f"model.path: reasoning in the form of {form} is not read: rewards and endpoint take it as answer"]
    demonstrations, skipped = load_demonstrations(config, splits, tokenizer)
    compared = chain(splits.evaluation, splits.train, _PROBES) if config.rolls_out else []
    return PreparedRun(
        run_id=run_id,
        model=model,
        tokenizer=partial(pickle.loads, pickle.dumps(tokenizer)),
        terms=ModelTerms(vocabulary, max_length, tokenizer.digest),
        tasks=splits.train,
        task_set=task_set,
        held_out=splits.evaluation,
        demonstrations=demonstrations,
        probe=choose_probe(compared, tokenizer, max_length),
        notices=(*_slow_models(config), *notices, *skipped),
        key_digests=keys,
        attention=models.attention_cost(model),
    )


def _check_calls(config: RunConfig, workflows: Mapping[str | None, Workflow], tokenizer: ChatTokenizer) -> list[str]:
    """Return notices of calls of tools whose format ``auto`` cannot find, or guesses. Raises ConfigError where a
    workflow calls tools and cannot read the model's calls."""
    forms = {"serve.tool_calls": config.endpoint.tool_calls} if config.endpoint is not None else {}
    must_read = set[str]()
    for name, workflow in workflows.items():
        field = f"explorer.workflow_options.{name or config.explorer.workflow}"
        forms[field] = getattr(workflow, "call_format", "")
        must_read |= {field} if isinstance(workflow, ToolCalling) else set()
    notices = []
    for field in (field for field, form in forms.items() if form == "auto"):
        try:
            notices.append(in_thread(partial(check_template, tokenizer, field)))
        except ConfigError as error:
            if field in must_read:
                raise
            notices.append(str(error))
    return [notice for notice in notices if notice]


def _slow_models(config: RunConfig) -> tuple[str, ...]:
    """Return a notice for each model on GPUs that computes in float32."""
    exact = {name: each.engine.gpus for name, each in config.auxiliary.items() if each.dtype == "float32"}
    gpus = {f"auxiliary.{name}.dtype": count for name, count in exact.items()}
    if config.model.dtype == "float32":
        gpus["model.dtype"] = max(config.explorer.engine.gpus * config.rolls_out, config.trainer.gpus * config.trains)
    slow = sorted(key for key, count in gpus.items() if count)
    return tuple(f"{key} is float32 on GPUs: bfloat16 takes half the memory and a fraction of the time" for key in slow)


def _model(config: RunConfig, tasks: list[Task]) -> str:
    """Return the path or hub id of the model; create it first if it is a tiny one."""
    tiny = config.model.tiny
    if tiny is None:
        return models.find_model(str(config.model.path), "model.path")
    from rayrft.trainer.tiny import make_tiny_model

    folder = config.folder / "model"
    if not folder.exists():  # else the run is resumed
        prompts = [message["content"] for task in tasks for message in task.messages]
        answers = [task.answer for task in tasks] + demonstrated_text(config)
        make_tiny_model(tiny, prompts, answers, folder, max_length=config.model.max_length, seed=config.seed)
    return str(folder)
