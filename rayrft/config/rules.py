"""Rules across the sections of a run's config. Each raises the error of `invalid`, with the full key, and a remedy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rayrft.config.base import invalid
from rayrft.config.trainer import WeightFilesConfig
from rayrft.errors import ConfigError, nearest

if TYPE_CHECKING:
    from rayrft.config.run import RunConfig


def check_required(config: RunConfig) -> None:
    """Check that the keys are given which the mode needs."""
    mode, model, bench = config.mode, config.model, config.bench
    if mode == "both" and config.tasks is None:
        raise invalid("tasks", "is required in mode 'both'", "add tasks, or use mode train or serve")
    if mode == "explore" and config.buffer.name is None:
        raise invalid("buffer.name", "is required in mode 'explore'", "name the Buffer that the job fills")
    if mode != "bench" and not config.stages:
        raise invalid("stages", "is required", "add at least one stage")
    if mode == "bench" and config.tasks is None and not bench.tasksets:
        raise invalid("bench.tasksets", "is required without 'tasks'", "add bench.tasksets or tasks")
    if mode == "bench" and model.path is None and not bench.models:
        raise invalid("bench.models", "is required without 'model.path'", "add bench.models or model.path")
    if mode != "bench" and model.path is None and model.tiny is None:
        remedy = "give either model.path, a Hugging Face model, or model.tiny, a generated one"
        raise invalid("model.path", "is required without 'model.tiny'", remedy)
    for name, demonstrations in config.demonstrations.items():
        if not demonstrations.origins and config.tasks is None:
            raise invalid(f"demonstrations.{name}.path", "is required without tasks", "give a file, or add tasks")


def check_mode(config: RunConfig) -> None:
    """Check that no key is given which the mode does not use."""
    mode, name = config.mode, config.buffer.name
    if mode == "both" and name is not None:
        remedy = "remove it, or use modes explore and train"
        raise invalid("buffer.name", "is only valid in modes explore, train and serve", remedy, value=name)
    if mode == "both" and config.buffer.max_age is not None:
        raise invalid("buffer.max_age", "is only valid in mode 'train'", "use max_staleness")
    if config.serve is not None and mode not in ("both", "serve"):
        raise invalid("serve", f"is only valid in modes both and serve, not {mode!r}", "remove it")
    if config.guards and not config.trains:
        raise invalid("guards", f"need optimiser steps, and mode {mode!r} takes none", "remove them")
    sampled = [stage.name for stage in config.stages if stage.groups]
    for stage in config.stages:
        if mode not in ("both", "bench") and stage.evaluate_every and not config.holds_out(stage):
            problem = "is only valid in mode 'both', and for pairs that are held out"
            raise invalid(f"stages.{stage.name}.evaluate_every", problem, "remove it, or set held_out of the pairs")
    if mode == "explore" and len(sampled) != 1:
        problem = "must contain exactly one stage that trains on usual rows in mode 'explore'"
        raise invalid("stages", problem, "remove the other stages", value=sampled)
    if config.pipelines.experiences and mode in ("train", "serve"):
        remedy = "remove it; `rayrft data process` works on the rows of a run"
        raise invalid("pipelines.experiences", f"needs an Explorer, and mode {mode!r} has none", remedy)
    for key in ("made", "actors") if not config.pipelines.experiences else ():
        if getattr(config.pipelines, key) is not None:
            raise invalid(f"pipelines.{key}", "is only valid with pipelines.experiences", "remove it, or add them")


def check_model_names(config: RunConfig) -> None:
    """Check that auxiliary models and endpoints have different names."""
    if both := sorted(config.auxiliary.keys() & config.pipelines.endpoints.keys()):
        raise invalid(f"pipelines.endpoints.{both[0]}", "is also the name of an auxiliary model", "use another name")


def check_stages(config: RunConfig) -> None:
    """Check the names of stages, what they start from, and that their batches can be dealt to the ranks."""
    seen: list[str] = []
    for stage in config.stages:
        field, name = f"stages.{stage.name}", stage.name
        if name in seen:
            raise invalid("stages", "contains two stages of this name", "use different names", value=name)
        if name == "final" or name.startswith(("step-", "stopped-")):
            raise invalid(f"{field}.name", "is reserved for checkpoints", "use another name", value=name)
        if stage.start_from is not None and stage.start_from not in seen:
            remedy = f"choose one of: {', '.join(seen)}" if seen else "remove it"
            raise invalid(f"{field}.start_from", "is not an earlier stage", remedy, value=stage.start_from)
        grows, source = config.grows(stage), stage.demonstrations
        if stage.expert_rows and source not in config.demonstrations and not grows:
            remedy = nearest(source or "", config.demonstrations) if config.demonstrations else "add the entry"
            raise invalid(f"{field}.demonstrations", "is not an entry of 'demonstrations'", remedy, value=source)
        demonstrations = stage.expert_rows // (2 if "pairs" in stage.algorithm.build().needs else 1)
        units = [stage.group_size] * stage.groups
        units += [1] * (0 if grows and stage.groups else demonstrations)  # while it grows there may be none yet
        mini_batches, ranks = stage.update.mini_batches, config.trainer.ranks
        if (least := min(sum(units[number::mini_batches]) for number in range(mini_batches))) < ranks:
            problem = f"leaves {least} rows or pairs for {ranks} ranks in one of {mini_batches} mini-batches"
            raise invalid(f"{field}.batch_size", problem, "raise it, or lower trainer.ranks", value=stage.batch_size)
        seen.append(name)


def check_expert_rows(config: RunConfig) -> None:
    """Check that each stage gets expert rows of the kind that its algorithm takes."""
    paired = {stage.demonstrations for stage in config.stages if "pairs" in stage.algorithm.build().needs}
    for name, demonstrations in config.demonstrations.items():
        if (held_out := demonstrations.held_out) and name not in paired:
            problem = "is not used: no stage trains on these preference pairs"
            raise invalid(f"demonstrations.{name}.held_out", problem, "remove it", value=held_out)
    for stage in config.stages:
        field, source = f"stages.{stage.name}.demonstrations", stage.demonstrations
        if not stage.expert_rows:
            continue
        if source == config.pipelines.made and stage.trains_reward_model:
            remedy = "export the pairs (rayrft data export) and name the file in 'demonstrations'"
            raise invalid(field, "must be a file: a reward model needs the template's tokens", remedy, value=source)
        second = "give the file a second entry in 'demonstrations'"
        if source in config.scored_demonstrations and not stage.trains_reward_model:
            raise invalid(field, "is tokenised for a reward model, up to the end of the template", second, value=source)
        if source in config.labelled_demonstrations and "labels" not in stage.algorithm.build().needs:
            raise invalid(field, "contains labelled answers, also bad ones", second, value=source)


def check_reward_models(config: RunConfig) -> None:
    """Check which stages train reward models, and that these are trained before they score."""
    trains = {stage.name: stage.trains_reward_model for stage in config.stages}
    for stage in config.stages:
        field = f"stages.{stage.name}"
        if stage.evaluate_every and trains[stage.name] and not config.holds_out(stage):
            remedy = f"remove it, or set demonstrations.{stage.demonstrations}.held_out"
            raise invalid(f"{field}.evaluate_every", "is not used: no pairs are held out", remedy)
        if stage.start_from is not None and trains[stage.start_from]:
            remedy = "remove it: a reward model's stage leaves the policy unchanged"
            raise invalid(f"{field}.start_from", "trains a reward model", remedy, value=stage.start_from)
    if not config.reward.stages:
        return
    field, give_model = "reward.options.stage", "set options.model to the folder of a trained reward model"
    if unknown := sorted(name for name in config.reward.stages if not trains.get(name, False)):
        known = [name for name, trained in trains.items() if trained]
        remedy = f"choose one of: {', '.join(known)}" if known else f"add one, or {give_model}"
        raise invalid(field, "is not a stage that trains a reward model", remedy, value=unknown[0])
    if config.mode not in ("both", "bench"):
        raise invalid(field, f"is only valid in mode 'both', not {config.mode!r}", give_model)
    early = "needs rewards before the reward model is trained"
    if config.mode == "both" and config.reward.placement == "serve":
        raise invalid("reward.placement", early, "use beside or pool", value="serve")
    for stage in config.stages[: config.scored_after + 1]:
        if stage.groups or (stage.evaluate_every and not trains[stage.name]):
            key = "algorithm" if stage.groups else "evaluate_every"
            remedy = f"move it after stage {config.stages[config.scored_after].name!r}, or remove it"
            raise invalid(f"stages.{stage.name}.{key}", early, remedy)


def check_sessions(config: RunConfig) -> None:
    """Check that sessions of the endpoint can be trained on."""
    if config.endpoint is not None and config.explorer.engine.sleep:
        raise invalid("explorer.engine.sleep", "cannot be used with an endpoint", "remove it")
    if not config.records_sessions:
        return
    if config.max_staleness == 0:
        remedy = "raise it: applications do not wait for the trainer; or set serve.record: false"
        raise invalid("max_staleness", "drops every session that started before the latest step", remedy, value=0)
    sizes = sorted({stage.group_size for stage in config.stages if stage.groups})
    if len(sizes) > 1:
        remedy = "use the same group_size in all stages"
        raise invalid("stages", "must have one group_size, that of all sessions", remedy, value=sizes)


def check_derived(config: RunConfig) -> None:
    """Check what stages need from other sections, such as a critic, and that they use what the trainer is given."""
    for stage in config.stages:
        field = f"stages.{stage.name}"
        if config.trainer.lora is not None and stage.update.reference_refresh:
            remedy = "remove it, or split the stage: each stage starts with the policy as its reference"
            raise invalid(f"{field}.update.reference_refresh", "cannot be used with trainer.lora", remedy)
        if config.mode == "train" and "answer_length" in stage.algorithm.build().needs:
            problem, remedy = "is required in mode 'train'", "give the length of the longest sampled answer, in tokens"
            raise invalid(f"{field}.algorithm.constant_length", problem, remedy)
        if config.trainer.router_loss and stage.trains_reward_model:
            problem, remedy = f"is not used by {stage.name!r}, a reward model's stage", "remove it, or split the run"
            raise invalid("trainer.router_loss", problem, remedy, value=config.trainer.router_loss)
    if config.stages and all(stage.trains_reward_model for stage in config.stages) and config.trainer.head_chunk:
        problem = "is not used: a reward model computes no logits of tokens"
        raise invalid("trainer.head_chunk", problem, "remove it", value=config.trainer.head_chunk)
    needed = config.buffer.needs_scores and config.buffer.sampler.score == "td_error"
    if needed and not any("critic" in stage.algorithm.build().needs for stage in config.stages):
        remedy = "use algorithm ppo, or score reward_deviation or failure"
        raise invalid("buffer.sampler.score", "needs a critic, and no stage has one", remedy, value="td_error")


def check_lengths(config: RunConfig) -> None:
    """Check that prompts and answers fit into ``model.max_length``."""
    sampling, most = config.explorer.sampling, config.model.max_length
    prompt, answer = sampling.max_prompt_tokens, sampling.max_tokens
    # An answer of the endpoint is as long as its prompt lets it be.
    if config.rolls_out and config.mode == "both" and prompt + answer > most:
        problem = f"is less than explorer.sampling.max_prompt_tokens + max_tokens, {prompt} + {answer}"
        raise invalid("model.max_length", problem, "raise it, or lower one of them", value=most)
    for section in ("evaluation", "bench") if config.rolls_out else ():
        longest = getattr(config, section).max_tokens or 0
        if prompt + longest > most:
            problem = f"plus explorer.sampling.max_prompt_tokens, {prompt}, exceeds model.max_length, {most}"
            raise invalid(f"{section}.max_tokens", problem, "lower it, or raise model.max_length", value=longest)
    if (overlong := config.reward.overlong_buffer or 0) > answer:
        raise invalid("reward.overlong_buffer", f"exceeds sampling.max_tokens, {answer}", "lower it", value=overlong)


def check_partial(config: RunConfig) -> None:
    """Check that partial rollouts are possible and have an effect."""
    partial = config.explorer.partial
    if partial is None:
        return
    if config.mode == "explore":
        raise invalid("explorer.partial", "is not valid in mode 'explore', whose weights are fixed", "remove it")
    if partial.budget is None and config.explorer.over_sampling == 1.0:
        remedy = "give a number of tokens, or raise explorer.over_sampling"
        raise invalid("explorer.partial.budget", "is required without over_sampling", remedy)
    if partial.old_tokens == "train" and config.max_staleness == 0:
        remedy = "raise it, or use mask"
        raise invalid("explorer.partial.old_tokens", "needs max_staleness above 0", remedy, value="train")


def check_feedback(config: RunConfig) -> None:
    """Check that groups can be held for people: within the bound of staleness, in a stage that issues tickets."""
    held = config.feedback.hold_steps
    if held > config.max_staleness:
        raise invalid("feedback.hold_steps", "exceeds max_staleness", "lower it, or raise max_staleness", value=held)
    if held and (config.mode not in ("both", "serve") or config.buffer.sampler.name != "fifo"):
        problem = "needs mode 'both' or 'serve' and buffer.sampler fifo"
        raise invalid("feedback.hold_steps", problem, "remove it", value=held)


def check_devices(config: RunConfig) -> None:
    """Check the GPUs of engines and trainer, and options that depend on how they share them."""
    engine, trainer = config.explorer.engine, config.trainer
    unused = "are not used in this run of mode"
    if engine.gpus and not config.rolls_out:
        raise invalid("explorer.engine.gpus", f"{unused} {config.mode!r}", "remove it", value=engine.gpus)
    if trainer.gpus and config.mode == "explore":
        raise invalid("trainer.gpus", f"{unused} {config.mode!r}", "remove it", value=trainer.gpus)
    asks = (config.rolls_out and config.mode != "serve") or config.pipelines.tasks
    for name, each in config.auxiliary.items():
        if each.engine.gpus and not asks:
            field = f"auxiliary.{name}.engine.gpus"
            raise invalid(field, f"{unused} {config.mode!r}", "remove the model", value=each.engine.gpus)
    if config.mode != "both":  # else no weight transport fits
        engine.check_alone("explorer.engine")
    if config.mode != "bench":  # else nothing is trained
        if config.mode == "both" and config.rolls_out and (engine.gpus > 0) != (trainer.gpus > 0):
            problem = f"must be above 0 exactly if trainer.gpus, {trainer.gpus:g}, is"
            raise invalid("explorer.engine.gpus", problem, "give GPUs to both or to neither", value=engine.gpus)
        if config.weight_sync.files != WeightFilesConfig() and config.weight_sync.backend != "files":
            problem, remedy = "are only used with weight_sync.backend: files", "set it, or remove them"
            raise invalid("weight_sync.files", problem, remedy)
        if trainer.gpus > 1:
            problem = "must be at most 1: a rank uses one GPU"
            raise invalid("trainer.gpus", problem, "use more ranks", value=trainer.gpus)
        if trainer.cpu_offload and not trainer.gpus:
            raise invalid("trainer.cpu_offload", "needs trainer.gpus above 0", "remove it, or give GPUs to the trainer")
        try:
            colocated = config.colocated
        except ConfigError as error:
            raise ValueError(error) from None
        if trainer.ranks > 1 and 0 < trainer.gpus <= 0.5 and not colocated:
            problem = f"lets several of {trainer.ranks} ranks share a GPU, which NCCL does not support"
            raise invalid("trainer.gpus", problem, "give each rank a GPU: 1", value=trainer.gpus)
        if engine.sleep and (not colocated or config.max_staleness or config.explorer.over_sampling > 1):
            remedy = "set weight_sync.backend: ipc, max_staleness: 0 and explorer.over_sampling: 1, or remove it"
            raise invalid("explorer.engine.sleep", "needs an engine and trainer that take turns on one GPU", remedy)
        if config.evaluation_engines and colocated:
            problem = f"must be 0 with weights over {config.sync_backend}, which reach only engines beside a rank"
            remedy = "give engines and ranks whole GPUs, or let the rollout engines evaluate: 0"
            raise invalid("evaluation.engines", problem, remedy, value=config.evaluation_engines)


RULES = (
    check_model_names, check_required, check_mode, check_stages, check_reward_models, check_expert_rows, check_sessions,
    check_derived, check_lengths, check_partial, check_feedback, check_devices,
)  # fmt: skip
"""All rules, in the order in which they are checked: later ones rely on earlier ones."""
