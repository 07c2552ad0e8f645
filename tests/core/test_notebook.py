"""What a notebook shows of runs, rows and reports: texts stay texts, gaps are left out, plots are live."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rayrft.core.doctor import Finding
from rayrft.core.plan import PartMemory
from rayrft.core.run import Run
from rayrft.core.run_files import read_run
from rayrft.errors import ConfigError, DataError, RunNotFound
from rayrft.experience import Experience, ExperienceGroup
from rayrft.markup import ReportTable
from rayrft.monitor.records import RecordFile, StepRecord
from rayrft.monitor.summary import RunStatus, read_summary
from tests.buffer.rows import group
from tests.errors import about
from tests.monitor.made import evaluation, step
from tests.scripted import handle
from tests.viewer.recorded import SCRIPT

TAGS = {"div", "span", "b", "table", "tr", "th", "td", "img", "code", "svg", "polyline"}


class Page(HTMLParser):
    """The elements and the text of HTML."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements, self.text = list[tuple[str, dict[str, str | None]]](), ""
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        self.elements.append((tag, dict(attributes)))

    def handle_data(self, data: str) -> None:
        self.text += f" {data}"


def shown(value: Any) -> Page:
    """What a notebook shows, which has no elements and attributes but the page's own."""
    page = Page(value._repr_html_())
    for tag, attributes in page.elements:
        assert tag in TAGS and not [name for name in attributes if name.startswith("on")], (tag, attributes)
        assert not (attributes.get("src") or "data:").partition("data:")[0], "loads something"
    return page


@pytest.fixture
def run(recorded_runs: Path) -> Callable[[str], Run]:
    return lambda name: Run(name, recorded_runs / name, handle(None))


def test_a_group_is_shown_side_by_side_with_its_tokens_and_texts_stay_texts(run: Callable[[str], Run]) -> None:
    found = run("words").group("words/mix/0/task00/2")
    assert (found.group_id, len(found.rows)) == ("words/mix/0/task00", 4)
    assert repr(found.rows[0]).startswith("<Experience words/mix/0/task00/0: reward ")
    page = shown(found)
    assert SCRIPT in page.text and page.text.count("Question 0: how much is 0 + 40?") == 1
    assert "4 rows of words/mix/0/task00" in page.text and all(f" /{repeat}" in page.text for repeat in range(4))
    assert page.text.count("form 1") == 4, "the parts of the reward"
    tokens = [attributes for tag, attributes in page.elements if tag == "span" and "title" in attributes]
    sampled = [each for each in tokens if "log-prob" in (each["title"] or "")]
    assert len(sampled) == sum(int(row.action_mask[row.prompt_length :].sum()) for row in found.rows) < len(tokens)
    assert all("rgba" in (each["style"] or "") for each in sampled)


def test_the_less_probable_a_token_the_redder_it_is() -> None:
    [row] = group(1, rows=1, length=4)
    logprobs = np.array([0, -0.0, -3.5, -np.inf], np.float32)
    page = shown(ExperienceGroup("1", (row.with_fields(logprobs=logprobs),), text_of=lambda token: "<b>x</b>"))
    colours = [attributes["style"] for tag, attributes in page.elements if tag == "span"]
    assert colours == [f"background:rgba(230,70,40,{alpha})" for alpha in ("0.00", "0.30", "0.60")]
    assert page.text.count("<b>x</b>") == 3


def test_without_a_tokenizer_a_group_has_turns_and_an_unknown_id_is_an_error(run: Callable[[str], Run]) -> None:
    page = shown(run("other").group("other/mix/3/task03"))
    assert not [tag for tag, _ in page.elements if tag == "span"] and "how much is 3 + 40?" in page.text
    images = [attributes["src"] or "" for tag, attributes in page.elements if tag == "img"]
    assert images and all(source.startswith("data:image/png;base64,") for source in images)
    with pytest.raises(DataError, match="no row of this id"):
        run("other").group("other/mix/9/none")


def test_a_row_with_nothing_but_its_tokens_is_shown_and_long_ones_are_cut() -> None:
    row = group(1, rows=1)[0].with_fields(reward=None, weight_versions=(), images=("<gone>.png",))
    page = shown(row)
    assert "unknown" in page.text and "no image at <gone>.png" in page.text and "versions" not in page.text
    long = row.with_fields(turns=({"role": "assistant", "content": "x" * 30_000}, {"content": "y"}))
    assert len(long._repr_html_()) < 25_000 and "10,000 more characters" in long._repr_html_()
    [tokens] = group(1, rows=1, length=5000)
    assert "4,000 more" in ExperienceGroup("1", (tokens,), text_of=str)._repr_html_().replace("3,999", "4,000")
    many = ExperienceGroup("1", tuple(group(1, rows=20)))
    assert shown(many).text.count(" row ") == 16 and "20 rows" in many._repr_html_()


def test_a_run_shows_its_state_and_its_end(run: Callable[[str], Run], monkeypatch: pytest.MonkeyPatch) -> None:
    page = shown(run("words"))
    for part in ("words", "finished", "mix", "sampled", "rayrft view "):
        assert part in page.text, part
    assert any(tag == "polyline" for tag, _ in page.elements)
    assert SCRIPT in shown(run("other")).text
    status = RunStatus("fresh", "running", None, 0, 0, None, ["trainer waits for <rows>"], None)
    monkeypatch.setattr(Run, "status", lambda self: status)
    assert "trainer waits for <rows>" in shown(run("fresh")).text and "running" in shown(status).text
    assert repr(run("fresh")).startswith("<Run fresh in /")


def test_an_ended_run_is_read_from_its_folder_without_a_cluster(
    recorded_runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(recorded_runs)
    words, fresh = read_run(recorded_runs / "words"), read_run("fresh")
    assert repr(words) == f"<RunFiles words in {recorded_runs / 'words'}>" and fresh.folder == recorded_runs / "fresh"
    assert words.status().status == "finished" and "finished" in shown(words).text and len(words.metrics()) == 12
    assert "it left no summary" in str(fresh.status().error)
    assert [row.source for row in words.group("90/0").rows] == ["expert"]
    with pytest.raises(RunNotFound, check=about("run", "word")):
        read_run("word")


def test_a_summary_shows_accuracies_with_counts(run: Callable[[str], Run]) -> None:
    summary = read_summary(run("words").folder)
    assert summary is not None
    change = summary.accuracy["0"]
    said = shown(summary).text
    assert f"({change.after.right}/{change.after.count}, " in said and "→" in said and "error" not in said
    assert SCRIPT in shown(replace(summary, error=SCRIPT, ledger=None, accuracy={})).text


def test_reports_are_tables_and_lines() -> None:
    findings = ReportTable([Finding("ok", "here", "fine"), Finding("fault", "<b>", "no GPU", "Add one")])
    page = shown(findings)
    assert [tag for tag, _ in page.elements].count("tr") == 3 and "<b>" in page.text
    assert repr(findings).splitlines()[1] == "fault  <b>: no GPU. Add one"
    parts = ReportTable([PartMemory("engine", 2, {"weights": 3.25}, 2.0, "give it more")])
    said = shown(parts).text
    assert "weights 3.25" in said and "give it more" in said and "False" in said
    assert "empty" in ReportTable[Finding]([])._repr_html_() and repr(ReportTable[Finding]([])) == ""


def test_a_plot_shows_rewards_of_any_size_pairs_and_seconds(run: Callable[[str], Run], tmp_path: Path) -> None:
    assert run("words").plot()._repr_png_().startswith(b"\x89PNG")
    assert run("fresh").plot()._repr_png_().startswith(b"\x89PNG"), "an empty plot"
    file = RecordFile(tmp_path)
    file.append(*(step(step=at, reward=-2.0 * at, wait_s=1.0, train_s=2.0) for at in (1, 2, 3, 2, 3)))
    file.append(step(step=4, reward=None, preference_loss=0.5, pair_accuracy=0.75), evaluation("mix", 4, 50, step=4))
    scores, times = Run("mine", tmp_path, handle(None)).plot().axes
    assert scores.get_ylim()[0] < -6 and scores.get_ylim()[1] >= 1
    labels = scores.get_legend_handles_labels()[1]
    assert {"reward of sampled answers", "pairs of the batch ranked right", "held-out accuracy, greedy"} == {*labels}
    assert times.get_legend_handles_labels()[1] == ["wait", "train", "sync", "other"]


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A notebook's output: what is drawn in it, and the pauses between."""
    drawn: list[Any] = []

    class Output:
        def update(self, figure: Any) -> None:
            drawn.append(figure)

    def display(figure: Any, display_id: bool) -> Output:
        assert display_id
        drawn.append(figure)
        return Output()

    monkeypatch.setattr("IPython.display.display", display)
    monkeypatch.setattr(time, "sleep", drawn.append)
    return drawn


def test_a_live_plot_is_drawn_again_at_most_once_a_second(
    tmp_path: Path, cell: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, first = RecordFile(tmp_path), step(step=1)
    file.append(first)

    def records(run: Run, first: int) -> Iterator[StepRecord]:
        assert first == 1, "what is in the first drawing"
        new = [step(step=at) for at in range(2, 7)]
        file.append(*new[:3])  # come together, and are drawn together
        yield from new[:3]
        file.append(*new[3:])
        yield from new[3:]

    monkeypatch.setattr(Run, "records", records)
    assert Run("mine", tmp_path, handle(None)).plot(live=True) is None  # type: ignore[func-returns-value]
    pauses = [each for each in cell if isinstance(each, float)]
    drawn = [len(each.axes[0].lines[0].get_xdata()) for each in cell if not isinstance(each, float)]
    assert drawn == [1, 4, 6] and len(pauses) == 2 and min(pauses) >= 1


def test_interrupting_the_cell_of_a_live_plot_ends_the_plot_alone(
    tmp_path: Path, cell: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def records(run: Run, first: int) -> Iterator[StepRecord]:
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(Run, "records", records)
    Run("mine", tmp_path, handle(None)).plot(live=True)
    assert len(cell) == 1


def test_a_live_plot_needs_a_notebook(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs a notebook"):
        Run("mine", tmp_path, handle(None)).plot(live=True)


def test_rows_are_still_equal_by_their_fields() -> None:
    [row] = group(1, rows=1)
    assert isinstance(row, Experience) and ExperienceGroup("1", (row,)) == ExperienceGroup("1", (row,), str)
