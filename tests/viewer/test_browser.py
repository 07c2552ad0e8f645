"""The viewer in a real browser: every view and filter, what a model wrote, links, keys, and a run that is running."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from rayrft.config import RunConfig
from rayrft.config.serve import ViewerConfig
from rayrft.core.plan import PartMemory, StepVolume
from rayrft.errors import ModelError
from rayrft.experience import TOKEN_REWARD, Task
from rayrft.explorer.evaluation import Attempt
from rayrft.explorer.unstored import UnstoredAnswers
from rayrft.runtime.serving import key_digest
from rayrft.viewer.app import Viewer
from rayrft.viewer.folders import Reports
from rayrft.viewer.index import read_log_rows
from tests import browser
from tests.browser import expect, needs_chromium
from tests.viewer.recorded import FILTERS, GROUPS, KEY, ROWS, SCRIPT, RecordedRun, stretch
from tests.viewer.sick import sick_run

pytestmark = needs_chromium


@contextmanager
def served(storage: Path, reports: Reports | None = None) -> Iterator[str]:
    """The address of a viewer over a storage."""
    with browser.served(Viewer(storage, ViewerConfig(), (key_digest(KEY),), reports=reports).app()) as address:
        yield address


def plan(config: RunConfig) -> list[Any]:
    [stage] = config.stages
    return [
        PartMemory("rank", 2, {"states": 1.5}, 80.0),
        StepVolume(stage.name, 16, 768, 0.02, 60.0, 1.8, 7.2, 207.0, 16.2),
    ]


def doctor(config: RunConfig) -> list[Any]:
    raise ModelError("no model", "give a folder", field="model.path")


@pytest.fixture(scope="module")
def url(storage: Path) -> Iterator[str]:
    with served(storage, {"plan": plan, "doctor": doctor}) as address:
        yield address


class Window(browser.Window):
    """A window of the viewer, opened by a link with the key."""

    def __init__(self, *given: Any, key: str = KEY, **context: Any) -> None:
        super().__init__(*given, key=key, **context)

    def open(self, query: str) -> None:
        self.page.goto(f"{self.url}{query}")
        self.ready()

    @property
    def overflow(self) -> int:
        """By how many pixels the page is wider than the window."""
        return int(self.page.evaluate("document.documentElement.scrollWidth - innerWidth"))


Open = Callable[..., Window]
EVALUATED = "group_status=evaluation&min_version=10&max_version=10"
"""In the address of the answers of the last evaluation of `words`."""


@pytest.fixture
def opened(browser: Any, url: str) -> Iterator[Open]:
    """Opens windows on the runs of `record_runs`, or on those of another storage."""
    windows, servers = list[Window](), dict[Path, str]()
    with ExitStack() as serving:

        def come(query: str = "", storage: Path | None = None, **how: Any) -> Window:
            if storage is not None and storage not in servers:
                servers[storage] = serving.enter_context(served(storage))
            windows.append(Window(browser, servers[storage] if storage else url, query, **how))
            return windows[-1]

        yield come
        for window in windows:  # before the servers end, whose absence the pages tell
            window.leave()


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_every_view_opens_from_the_one_before_and_fits(width: int, scheme: str, opened: Open) -> None:
    window = opened(viewport={"width": width, "height": 844}, color_scheme=scheme)
    window.see("article.run").to_have_count(3)
    window.see(".run:has-text('words') .pill >> nth=0").to_have_text("finished")
    window.see(".run:has-text('words') .ledger").to_contain_text("144 trained")
    window.click(".run:has-text('words') .ledger a[title^=late]")
    window.see("table.rows tbody tr").to_have_count(2 * ROWS)
    window.page.go_back()
    window.see(".compare canvas").to_have_count(1)
    assert window.overflow <= 0
    window.click("article.run a:text-is('words')")
    window.see("h1").to_have_text("words")
    expect(window.page.locator(".charts figure").nth(11)).to_be_visible()
    window.see(".events").to_contain_text("engine-0 restarted after 4.2 s: its process died")
    assert window.overflow <= 0
    window.click("nav a:text-is('Experiences')")
    window.see("table.rows tbody tr").to_have_count(50)
    assert window.overflow <= 0
    window.click("table.rows tbody tr:nth-child(2) a")
    window.see("#drawer .tokens span.own >> nth=0").to_be_visible()
    window.see("#drawer .sibling").to_have_count(ROWS)
    assert window.overflow <= 0
    window.click("#drawer button[aria-label=Close]")
    window.see("#drawer").to_be_hidden()
    window.click("nav a:text-is('Tasks')")
    window.see("table.rows tbody tr").to_have_count(7)
    assert window.overflow <= 0
    window.click("nav a:text-is('Advice')")
    window.see("main .empty").to_contain_text("Nothing stands out")
    assert window.overflow <= 0
    window.click("nav a:text-is('Timeline')")
    window.see("canvas").to_be_visible()
    assert window.overflow <= 0
    window.click("nav a:text-is('Plan')")
    window.see("table.rows").to_have_count(2)
    assert window.overflow <= 0
    window.page.go_back()
    window.see("nav a[aria-current]").to_have_text("Timeline")


def test_runs_are_compared_as_they_are_chosen(opened: Open) -> None:
    window = opened()
    for number, rows in (("reward", "min_step=12&max_step=12"), ("accuracy", EVALUATED)):
        led = window.see(f".run:has-text('words') .metric:has-text('{number}') a")
        led.to_have_attribute("href", f"?view=experiences&run=words&{rows}")
    window.see(".run:has-text('fresh') .metric:has-text('reward') a").to_have_count(0)
    window.see(".compare .legend span").to_have_text(["other", "words"])
    window.page.uncheck("input[aria-label='Compare other']")
    window.see(".compare .legend span").to_have_count(0)
    window.page.select_option("select[aria-label=metric]", "entropy")
    window.page.select_option("select[aria-label=over]", "tokens")
    window.see(".compare figcaption b").to_have_text("entropy over tokens")
    for part in ("metric=entropy", "axis=tokens", "compare=words"):
        assert part in window.page.url
    again = opened(window.page.url.removeprefix(window.url))
    again.see(".compare figcaption b").to_have_text("entropy over tokens")


@pytest.mark.parametrize(
    ("query", "chart", "point", "rows"),
    [
        ("?view=run&run=words", "Reward", "step 12", "min_step=12&max_step=12"),
        ("?view=run&run=words", "Accuracy", "step 10", EVALUATED),
        ("?view=run&run=words&axis=hours", "Accuracy", "hours 0.167", EVALUATED),
        ("?axis=tokens", "reward over tokens", "tokens", "run=words&min_step=12&max_step=12"),
        ("?metric=accuracy", "accuracy over step", "step 10", f"run=words&{EVALUATED}"),
        ("?view=tasks&run=words", "Pass rate", "version 11", "min_version=11&max_version=11"),
    ],
)
def test_a_click_at_a_point_opens_its_rows(query: str, chart: str, point: str, rows: str, opened: Open) -> None:
    window = opened(query)
    figure = window.page.locator(f"figure:has-text('{chart}') >> nth=0")
    box = figure.locator(".u-over").bounding_box()
    at = box["x"] + box["width"] - 2, box["y"] + 40
    window.page.mouse.move(*at)
    expect(figure.locator(".readout")).to_contain_text(point)
    window.page.mouse.click(*at)
    window.see("nav a[aria-current]").to_have_text("Experiences")
    window.see(".pages").to_contain_text("No such row" if EVALUATED in rows else "of 12 rows")
    assert rows in window.page.url


def test_a_point_of_a_long_run_opens_the_steps_whose_mean_it_is_and_rare_numbers_are_seen(
    opened: Open, tmp_path: Path
) -> None:
    run = RecordedRun(tmp_path)
    run.train()
    run.finish()
    run.close()
    stretch(run.folder, 4000, lambda step: {"reward": step / 4000, "probe_gap": None if step % 50 else 0.004})
    count = """canvas => {
        const shown = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
        let coloured = 0;
        for (let at = 0; at < shown.length; at += 4) coloured += shown[at + 3] > 200 && COLOUR;
        return coloured;
    }"""
    orange, blue = "shown[at] > 180 && shown[at + 2] < 60", "shown[at] < 100 && shown[at + 2] > 160"
    window = opened("?view=run&run=words", storage=tmp_path)
    gaps = window.page.locator(".charts figure:has-text('Log-prob gap') canvas")
    assert gaps.evaluate(count.replace("COLOUR", orange)) > 100, "the probe's points are drawn"
    box = window.page.locator(".charts .u-over >> nth=0").bounding_box()
    at = box["x"] + box["width"] / 2, box["y"] + 40
    window.page.mouse.move(*at)
    window.see(".charts .readout >> nth=0").to_contain_text("step ")
    window.page.mouse.click(*at)
    window.see("nav a[aria-current]").to_have_text("Experiences")
    first, last = map(int, re.findall(r"_step=(\d+)", window.page.url))
    assert first % 3 == 1 and last == first + 2
    window.open("?metric=probe_gap&smooth=0")
    window.see(".compare .controls").to_contain_text("mean of 3 steps of words")
    compared = window.page.locator(".compare canvas")
    assert compared.evaluate(count.replace("COLOUR", blue)) > 100


def test_the_widest_gap_of_engine_and_trainer_leads_to_its_tokens(opened: Open) -> None:
    window = opened("?view=run&run=words")
    window.click(".metric:has-text('widest gap') a")
    window.see("#drawer select[aria-label=colour]").to_have_value("trainer")
    window.page.locator("#drawer .tokens span.own >> nth=-1").hover()
    window.see("#drawer .readout").to_contain_text("trainer -0.75")


def test_every_filter_is_set_and_taken_back_by_its_field(opened: Open) -> None:
    window = opened("?view=experiences&run=words&source=usual")
    window.see(".mean").to_contain_text("152 rows in 38 groups")
    labels = {"group_status": "group", "stop_reason": "ended by", "status": "status", "drop_reason": "dropped for"}
    labels |= {"source": "source", "text": "text", "task_id": "task", "where": "condition in SQL"}
    for name, (value, _) in FILTERS.items():
        if name in ("source", "group_id"):  # the one is set already, the other is set by links
            continue
        end, _, of = name.partition("_")
        label = labels.get(name) or f"{end} {'trained in step' if of == 'step' else of}"
        field = window.page.locator(f"details.filters [aria-label='{label}']")
        if name in ("group_status", "stop_reason", "status", "drop_reason"):
            field.select_option(str(value))
        else:
            field.fill(str(value))
            field.press("Enter")
        taken = window.page.locator(f"button[aria-label='Remove filter {name}']")
        expect(taken).to_contain_text(str(value))
        taken.click()
        expect(taken).to_have_count(0)
        window.see(".mean").to_contain_text("152 rows in 38 groups")
    window.page.select_option("select[aria-label=sort]", "-tokens")
    window.ready()
    lengths = [int(each) for each in window.page.locator("table.rows tbody td:nth-child(4)").all_text_contents()]
    assert lengths == sorted(lengths, reverse=True)
    window.click("button:text-is('More')")
    window.see(".pages").to_contain_text("51–100 of 152")
    window.page.fill("[aria-label='condition in SQL']", "rewrd > 1")
    window.page.press("[aria-label='condition in SQL']", "Enter")
    window.see("main .problem").to_contain_text('Referenced column "rewrd" not found')
    assert [error for error in window.errors if "400" not in error] == []
    window.errors.clear()  # the browser's own line on the refused request


def test_what_a_model_wrote_stays_text(opened: Open) -> None:
    window = opened("?view=experiences&run=words&id=words/mix/0/task00/0")
    window.see("#drawer .turns .text >> nth=-1").to_have_text(SCRIPT)
    window.see("#drawer .sibling >> nth=0").to_contain_text("<script>")
    window.see("#drawer .tokens").to_contain_text("<script>")
    window.page.fill("[aria-label=text]", "<script>") if window.page.is_visible("[aria-label=text]") else None
    window.open("?view=experiences&run=words&text=<script>")
    window.see("table.rows .said").to_have_text([SCRIPT])
    window.open("?view=tasks&run=words&text=<script>alert(1)</script>")
    window.see(".pages").to_contain_text("No such task.")
    assert window.page.title() == "words · rayrft"
    assert window.page.locator("main script, #drawer script, main img").count() == 0


def test_a_row_is_shown_with_its_turns_tokens_image_and_fate(opened: Open) -> None:
    window = opened("?view=experiences&run=words&id=words/mix/3/task03/0")
    window.see("#drawer .turns .role").to_have_text(["Question", "Model", "Tool", "Model"])
    window.see("#drawer .turns img").to_have_js_property("naturalWidth", 160)
    window.see("#drawer dl").to_contain_text("trained in step 2")
    window.see("#drawer dl").to_contain_text("v1")
    token = window.page.locator("#drawer .tokens .own >> nth=3")
    token.hover()
    window.see("#drawer .readout").to_contain_text("log-prob")
    for colouring in ("advantage", "gap", "version", "mask", "logprob"):
        window.page.select_option("select[aria-label=colour]", colouring)
        expect(window.page.locator("#drawer select[aria-label=colour]")).to_have_value(colouring)
        assert f"colour={colouring}" in window.page.url
        told = window.see("#drawer .strip")
        (told.to_contain_text if colouring == "advantage" else told.not_to_contain_text)("in training may differ")
    window.click("#drawer .sibling >> nth=1")
    window.see("#drawer h1").to_have_text("words/mix/3/task03/1")
    window.click("#drawer dl a >> nth=0")
    window.see("table.rows tbody tr").to_have_count(GROUPS * ROWS)
    window.open("?view=experiences&run=words&id=words/mix/99/none/0")
    window.see("#drawer .problem").to_contain_text("There is no row 'words/mix/99/none/0'")
    window.errors.clear()  # the browser's own line on the refused request


def test_tokens_are_coloured_by_the_reward_to_go_where_an_answer_has_rewards_inside(
    opened: Open, tmp_path: Path
) -> None:
    given = len("Use the calculator, and answer with a number.\nQuestion 0: how much is 0 + 40?\n")
    inside = {f"{TOKEN_REWARD}{given + 1}": 0.25, f"{TOKEN_REWARD}{given + 3}": 0.5}
    run = RecordedRun(tmp_path, planted=(lambda done: {}, lambda done, number: {"metrics": inside}))
    run.train()
    run.finish()
    run.close()
    window = opened("?view=experiences&run=words&id=words/mix/0/task00/0&colour=advantage", storage=tmp_path)
    window.see("#drawer select[aria-label=colour] option:checked").to_have_text("reward to go")
    for at, left in ((0, "0.75"), (2, "0.5"), (4, "0")):
        window.page.locator("#drawer .tokens span.own").nth(at).hover()
        window.see("#drawer .readout").to_contain_text(re.compile(rf"reward to go {left}($| )"))


def test_tasks_are_chosen_by_what_became_of_them(opened: Open) -> None:
    window = opened("?view=tasks&run=words&least=2")
    window.see(".segments button").to_contain_text(["All7", "Solved0", "Never solved7", "Unlearned0"])
    window.click(".segments button:has-text('Solved') >> nth=0")
    window.see(".pages").to_contain_text("No such task.")
    window.page.fill("[aria-label='passes from reward']", "1")
    window.page.press("[aria-label='passes from reward']", "Enter")
    window.see("table.rows tbody tr >> nth=0").to_be_visible()
    window.page.select_option("select[aria-label=sort]", "rate")
    window.ready()
    rates = [float(each.split()[0]) for each in window.page.locator("table.rows td:first-child").all_text_contents()]
    assert rates == sorted(rates)
    window.page.fill("[aria-label=text]", "task03")
    window.page.press("[aria-label=text]", "Enter")
    window.see("table.rows tbody tr").to_have_count(1)
    window.click("table.rows a")
    window.see("nav a[aria-current]").to_have_text("Experiences")
    window.see(".chips").to_contain_text("task id: task03")


def test_the_timeline_tells_what_steps_waited_for(opened: Open) -> None:
    window = opened("?view=timeline&run=words&first=3&last=4")
    window.see("table.rows >> nth=0").to_contain_text("rollout 4 s")
    window.see("main > .legend").to_contain_text("rollout")
    window.see(".timeline .legend span").to_have_text(["train", "generate", "score", "lease"])
    canvas = window.page.locator("canvas")
    box = canvas.bounding_box()
    y = box["y"] + 5 * 44 - 12  # the fourth lane is the engine's
    window.page.mouse.move(box["x"] + box["width"] * 0.03, y - 44)
    window.see(".readout").to_contain_text("generate 4 s, 12 at once (explorer-0)")
    window.page.mouse.move(box["x"] + 10, y)
    window.page.mouse.down()
    window.page.mouse.move(box["x"] + box["width"] / 4, y)
    window.page.mouse.up()
    window.see("figcaption b").to_contain_text("16.")
    window.click("[aria-label='Zoom out']")
    window.see("figcaption b").to_contain_text("33.")
    window.click("text=Lanes as numbers")
    window.see("details.busy tbody tr").to_have_count(4)
    window.click("[aria-label='The latest steps']")
    window.see("table.rows >> nth=0 >> tbody >> tr").to_have_count(5)
    window.click("[aria-label='Steps before']")
    window.see("[aria-label='last step']").to_have_value("7")
    window.click("td.what a >> nth=0")
    window.see("table.rows tbody tr").to_have_count(ROWS)
    window.page.go_back()
    window.click("table.rows >> nth=0 >> td >> nth=0 >> a")
    window.see("table.rows tbody tr").to_have_count(GROUPS * ROWS)
    window.open("?view=timeline&run=fresh")
    window.see("main .empty").to_contain_text("writes no traces")


def test_the_plan_of_a_run_and_the_doctors_findings_are_tables(opened: Open) -> None:
    window = opened("?view=before&run=words")
    window.see("table.rows").to_have_count(2)
    window.see("table.rows >> nth=0").to_contain_text("states 1.5")
    window.see("table.rows >> nth=1 >> td >> nth=0").to_have_text("mix")
    window.see("table.rows >> nth=1").to_contain_text("GB of checkpoints a day")
    window.click("button:has-text('Examine')")
    window.see("section .problem").to_contain_text("no model")


def test_an_answer_of_an_evaluation_is_shown_without_tokens(opened: Open, copied: Path) -> None:
    writer, task = UnstoredAnswers(copied / "words", "explorer-0"), Task.create("test", "How many are there?", "4")
    attempts = [Attempt(task.id, number, 0.0, response=f"It is {SCRIPT} {number}", versions=(9,)) for number in (0, 1)]
    with ThreadPoolExecutor(1) as thread:  # Playwright's loop is in this one
        thread.submit(asyncio.run, writer.add_evaluated([task], attempts, 0.0)).result()
    window = opened("?view=experiences&run=words&group_status=evaluation", storage=copied)
    window.see("table.rows tbody tr").to_have_count(2)
    window.click("table.rows tbody tr >> nth=0 >> a")
    window.see("#drawer dl").to_contain_text("measured in an evaluation")
    window.see("#drawer .sibling").to_have_count(2)
    window.see("#drawer .turns").to_contain_text(SCRIPT)
    window.see("#drawer .tokens").to_have_count(0)


@pytest.mark.parametrize("width", [1280, 390])
def test_the_advice_on_a_sick_run_leads_to_its_rows_and_its_curve(width: int, opened: Open, tmp_path: Path) -> None:
    sick_run(tmp_path, "Answers are cut")
    window = opened("?view=experiences&run=words", storage=tmp_path, viewport={"width": width, "height": 844})
    window.see("table.rows tbody tr").to_have_count(50)
    window.click("nav a:text-is('Advice')")
    window.see("article.run h2 >> nth=0").to_have_text("Answers are cut")
    assert window.overflow <= 0
    window.click("article.run >> nth=0 >> a:has-text('rows that show it')")
    window.see(".chips").to_contain_text("stop_reason")
    window.see("table.rows tbody tr").to_have_count(50)
    assert window.overflow <= 0
    window.page.go_back()
    window.click("article.run >> nth=0 >> a:has-text('curves, with truncated_share')")
    window.see("figcaption:has-text('Truncated answers')").to_be_visible()


def test_answers_are_judged_on_the_feedback_page_of_a_run(opened: Open, copied: Path) -> None:
    (copied / "words" / "plugin.py").write_text("raise RuntimeError('it was run')")
    config = copied / "words" / "config.yaml"
    config.write_text(config.read_text().replace("plugins: []", f"plugins: [{copied}/words/plugin.py]"))
    assert "plugin.py" in config.read_text()
    window = opened("?view=run&run=words", storage=copied)
    window.click("nav a:has-text('Feedback')")
    window.see("body").to_contain_text("Your name")
    expect(window.page).to_have_url(re.compile(r"/feedback/words/(?!.*key=)"))
    window.page.fill("input >> nth=0", "Ann")
    window.page.press("input >> nth=0", "Enter")
    window.see("body").to_contain_text("Question")
    window.click("header a:text-is('Viewer')")
    window.see("h1").to_have_text("words")


def test_a_wrong_key_is_asked_for_again(opened: Open) -> None:
    window = opened(key="sk-wrong")
    window.see("#login").to_be_visible()
    window.see("#login-problem").to_have_text("Incorrect API key provided.")
    assert "key=" not in window.page.url, "the link's key is not left in the address"
    window.page.fill("#login-key", KEY)
    window.page.press("#login-key", "Enter")
    window.see("article.run").to_have_count(3)
    window.errors.clear()  # the browser's own lines on the refused requests


def test_the_page_of_a_running_run_updates_itself(opened: Open, tmp_path: Path) -> None:
    run = RecordedRun(tmp_path, "live")
    run.train(2)
    curves = opened("?view=run&run=live", storage=tmp_path)
    rows = opened("?view=experiences&run=live&group_status=trained", storage=tmp_path)
    runs = opened(storage=tmp_path)
    curves.see(".facts").to_contain_text("2 / 40")
    rows.see(".mean").to_contain_text(f"{2 * GROUPS * ROWS} rows")
    runs.see(".facts").to_contain_text("2 / 40")
    for window in (curves, rows, runs):
        window.see("#live").to_have_text("live")
    run.train(2)
    run.restart("killed by the test")
    curves.see(".facts").to_contain_text("4 / 40")
    curves.see(".events").to_contain_text("killed by the test")
    rows.see(".mean").to_contain_text(f"{4 * GROUPS * ROWS} rows")
    runs.see(".facts").to_contain_text("4 / 40")
    run.finish()
    curves.see(".pill >> nth=0").to_have_text("finished")
    runs.see(".pill >> nth=0").to_have_text("finished")
    run.close()


def test_a_damaged_log_is_named_on_the_page(opened: Open, copied: Path) -> None:
    segment = copied / "words" / "buffer" / "segment-00000000.arrow"
    segment.write_bytes(segment.read_bytes()[:-100])
    with (copied / "words" / "metrics.jsonl").open("r+b") as records:
        records.seek(2)
        records.write(b"\x00")
    window = opened("?view=experiences&run=words", storage=copied)
    window.see("main .problem").to_contain_text("the file was changed since it was written")
    window.open("?view=run&run=words")
    window.see("main .problem").to_contain_text("is damaged in the line at byte 0")


def test_rows_whose_log_was_still_being_read_are_shown_once_it_has_been(
    opened: Open, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = threading.Event()

    def read_when_let(*given: Any) -> Any:
        assert held.wait(60)
        return read_log_rows(*given)

    monkeypatch.setattr("rayrft.viewer.index.read_log_rows", read_when_let)
    window = opened(storage=copied)
    window.click("article.run a:text-is('words')")
    window.click("nav a:text-is('Experiences')")
    window.see("main .notice").to_contain_text("Reading the log")
    held.set()
    window.see("table.rows tbody tr").to_have_count(50)
