"""A trained model for others: its model card, and the upload to the hub."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

from rayrft.buffer.ledger import Ledger
from rayrft.config import dump_config, load_run_config
from rayrft.core.checkpoints import Checkpoints
from rayrft.core.doctor import installed_versions
from rayrft.errors import ConfigError, first_line
from rayrft.monitor.records import read_records
from rayrft.monitor.report import accuracy_table
from rayrft.monitor.summary import rows_in_log


def write_card(run_folder: Path, to: Path, step: int) -> None:
    """Write the model card ``README.md`` of the checkpoint that was exported to the folder ``to``: stages, accuracies
    up to its step, the run's ledger, versions and config. The plot of the run lies beside it, if there is one."""
    config = load_run_config(run_folder)
    progress = next(each for each in Checkpoints(run_folder, config.checkpoint).all() if each.step == step)
    taken = {config.stages[progress.stage].name: progress.stage_step, **progress.stages_done}
    stages = [stage for stage in config.stages if taken.get(stage.name)]
    records = [record for record in read_records(run_folder) if record.step <= step]
    rows = rows_in_log(run_folder)
    plot = run_folder / "plot.png"
    if plot.exists():
        shutil.copy(plot, to / "plot.png")
    steps = [(stage.name, stage.algorithm.name, str(taken[stage.name])) for stage in stages]
    names = list(dict.fromkeys(name for _, name, _ in steps))
    adapter = (to / "adapter_config.json").exists()
    about = {
        "library_name": "peft" if adapter else "transformers",
        "pipeline_tag": "text-classification" if stages[-1].trains_reward_model else "text-generation",
        "tags": ["rayrft", "reinforcement-learning", *names],
    }
    base = None if config.model.tiny is not None else str(config.model.path)
    if base is not None and not Path(base).exists():
        about["base_model"] = base
    versions = [f"{name} {found}" for name, found in installed_versions().items() if found != "none"]
    parts = [
        f"# {config.name}\n\nStep {step} of a run that trained {base or 'a tiny random model'} with rayrft.",
        "## Stages\n\n" + _table(("stage", "algorithm", "steps"), steps),
        f"## Accuracy\n\n```\n{accuracy_table(records)}\n```" + ("\n\n![The run](plot.png)" if plot.exists() else ""),
        *([f"## Rows\n\nOf the whole run.\n\n{_ledger(rows.ledger)}"] if rows is not None else []),
        "## Versions\n\n" + ", ".join(versions),
        f"## Config\n\n```yaml\n{dump_config(config)}```",
    ]
    card = f"---\n{yaml.safe_dump(about, sort_keys=False)}---\n\n" + "\n\n".join(parts) + "\n"
    (to / "README.md").write_text(card, encoding="utf-8")


def check_hub(repo: str) -> None:
    """Raise ConfigError unless the hub knows the user, before anything is exported."""
    from huggingface_hub import HfApi

    with _refusals(repo):
        HfApi().whoami()


def push(folder: Path, repo: str, *, private: bool) -> str:
    """Upload a folder as a model of the hub, which is created if it does not exist; return its address. Raises
    ConfigError."""
    from huggingface_hub import HfApi

    with _refusals(repo):
        api = HfApi()
        created = api.create_repo(repo, private=private, exist_ok=True)
        api.upload_folder(repo_id=created.repo_id, folder_path=folder, commit_message="Upload by rayrft")
        return str(created)


@contextlib.contextmanager
def _refusals(repo: str) -> Iterator[None]:
    """Turn the hub's errors into ConfigError."""
    try:
        yield
    except Exception as error:  # its client raises errors of the HTTP library that it has, too
        remedy = "log in (hf auth login, or HF_TOKEN) with a token that may write to this repository"
        raise ConfigError(f"the hub refused: {first_line(error)}", remedy, field="push", value=repo) from None


def _ledger(ledger: Ledger) -> str:
    dropped = [(f"dropped: {reason}", str(count)) for reason, count in sorted(ledger.dropped.items())]
    rows = [("sampled", str(ledger.sampled)), ("trained", str(ledger.trained)), *dropped, ("held", str(ledger.held))]
    return _table(("rows", "count"), rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *rows])
