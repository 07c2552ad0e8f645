"""``rayrft data feedback``: what people said of a run's answers, as files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rayrft.cli import Run as RunName
from rayrft.cli import Storage, archive_of, changes, report_damage
from rayrft.config import read_config
from rayrft.config.serve import FeedbackConfig
from rayrft.core.checkpoints import RUNS, find_folder
from rayrft.files import local_path

app = typer.Typer(no_args_is_help=True, help="What people said of a run's answers, as files.")

_Form = Annotated[
    str, typer.Option("--format", help="pairs, answers, labelled or scores, to train on; argilla or label_studio")
]
_Settings = Annotated[list[str] | None, typer.Argument(help="those of the page: levels=5 reward_range=[0,1] …")]


@app.command("export")
def export_feedback(
    run: RunName,
    out: Annotated[Path, typer.Argument(parser=local_path, help="a JSONL file to write")],
    settings: _Settings = None,
    form: _Form = "pairs",
    storage: Storage = RUNS,
) -> None:
    """Write what people said of a run's answers, also while the page is open."""
    from rayrft.feedback.exchange import read_answers, write_feedback
    from rayrft.feedback.journal import FILE, feedback_folder, read_journal
    from rayrft.feedback.judgements import Judgements

    entries = read_journal(feedback_folder(find_folder(run, storage)) / FILE)
    judgements = Judgements(read_config(FeedbackConfig, {}, changes(settings)), entries)
    archive = archive_of(run, storage)
    answers = read_answers(archive, {row for each in judgements.all.values() for row in each.rows})
    rows, missing = write_feedback(judgements, answers, out, form)
    print(f"{rows} rows in {out}")
    if missing:
        print(f"left out {missing} judgements of answers that are no longer in the run's log")
    report_damage(archive)


@app.command("import")
def import_feedback(
    run: RunName,
    file: Annotated[Path, typer.Argument(parser=local_path, help="JSONL, or one JSON list")],
    settings: _Settings = None,
    form: _Form = "argilla",
    storage: Storage = RUNS,
) -> None:
    """Take what people said elsewhere of a run's answers; the page tells the run of it when it is opened."""
    from rayrft.feedback.exchange import read_answers, read_feedback
    from rayrft.feedback.journal import entry_line, feedback_folder, open_journal
    from rayrft.feedback.judgements import JudgementAdded

    checked = read_config(FeedbackConfig, {}, changes(settings))
    found = read_feedback(file, form, read_answers(archive_of(run, storage)), checked)
    journal, entries = open_journal(feedback_folder(find_folder(run, storage)), wait=False)
    known = {entry.judgement.id for entry in entries if entry.kind == "judged"}
    new = [each for each in found if each.id not in known]
    journal.append(*map(entry_line, map(JudgementAdded, new)), durable=True)
    journal.close()
    print(f"{len(new)} judgements imported, {len(found) - len(new)} were there")
