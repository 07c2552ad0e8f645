"""The viewer over HTTP: what it says of runs and rows, what it refuses, and files that are broken or grow."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from rayrft.buffer.reader import Archive
from rayrft.config import load_run_config
from rayrft.core.services import REPORTS
from rayrft.data.task_splits import COUNTS, TASKS_FILE
from rayrft.experience import Task, VersionSpan
from rayrft.explorer.evaluation import Attempt
from rayrft.explorer.unstored import UnstoredAnswers
from rayrft.monitor.records import read_records
from rayrft.viewer.app import VIEWS
from rayrft.viewer.index import read_log_rows
from tests.buffer.rows import group
from tests.viewer.client import Client
from tests.viewer.recorded import FILTERS, GROUPS, ROWS, SCRIPT, RecordedRun, stretch


@pytest.fixture
def client(storage: Path) -> Client:
    return Client(storage)


def every_row(storage: Path) -> list[dict[str, Any]]:
    """The usual rows of `words`, as the log's own reader gives them."""
    archive = Archive.of_run(storage / "words")
    return [row for batch in archive.rows() for row in batch.to_pylist(maps_as_pydicts="strict")]


def short_run(storage: Path, steps: int, **settings: Any) -> None:
    run = RecordedRun(storage, **settings)
    run.train(steps)
    run.close()


async def test_runs_are_told_with_their_end_ledger_curves_and_verdict(client: Client) -> None:
    runs = {run["run"]: run for run in (await client.ask("runs"))["runs"]}
    words = runs["words"]
    assert (words["status"], words["step"], words["version"], words["stage"]) == ("finished", 12, 12, "mix")
    assert len(words["reward"]) == 12 and [step for step, _ in words["accuracy"]] == [0, 10]
    ledger = words["ledger"]
    assert ledger["trained"] == 12 * GROUPS * ROWS and ledger["dropped"]["late"] == 2 * ROWS
    assert ledger["sampled"] == ledger["trained"] + sum(ledger["dropped"].values()) + ledger["held"]
    assert words["verdict"].startswith("trainer waited") and words["problems"] == []
    assert (runs["other"]["status"], runs["other"]["error"]) == ("failed", f"trainer rank 0: {SCRIPT}")
    assert (runs["fresh"]["status"], runs["fresh"]["step"], runs["fresh"]["reward"]) == ("running", 0, [])


@pytest.mark.parametrize("axis", ["step", "samples", "tokens", "hours"])
async def test_runs_are_compared_on_one_axis(axis: str, client: Client) -> None:
    found = await client.ask("compare", runs="words,other,fresh", axis=axis)
    words, other = found["curves"]  # the third has no steps
    assert [len(each["y"]) for each in (words, other)] == [12, 4]
    last = {"step": 12, "samples": 12 * GROUPS * ROWS, "hours": 0.2}.get(axis)
    assert words["x"] == sorted(words["x"]) and (last is None or words["x"][-1] == pytest.approx(last))
    assert "accuracy" in found["metrics"] and "grad_norm" in found["metrics"]
    accuracy = await client.ask("compare", runs="words", metric="accuracy", axis=axis)
    assert len(accuracy["curves"][0]["y"]) == 2


MARKS = [("note", 0), ("change", 7), ("restart", 7), ("checkpoint", 10)]


async def test_a_run_has_its_numbers_by_step_and_what_happened(client: Client, storage: Path) -> None:
    run = await client.ask("run", run="words")
    steps = [record for record in read_records(storage / "words") if record.kind == "step"]
    assert run["columns"]["reward"] == [pytest.approx(record.reward) for record in steps]
    assert run["columns"]["entropy"] == [pytest.approx(record.metrics.entropy) for record in steps]
    assert [(mark["kind"], mark["step"]) for mark in run["marks"]] == MARKS
    assert run["marks"][2]["text"] == "engine-0 restarted after 4.2 s: its process died"
    assert run["stage_starts"] == [["mix", 1]]


async def test_a_long_run_is_told_by_means_of_several_steps(tmp_path: Path) -> None:
    short_run(tmp_path, 1)
    stretch(tmp_path / "words", 4000, lambda step: {"reward": step % 2})
    found = await Client(tmp_path).ask("run", run="words")
    assert found["mean_of"] == 3 and found["step"] == 4000
    assert found["columns"]["step"][:2] == [2, 5] and found["columns"]["reward"][0] == pytest.approx(2 / 3)


ENDLESS = "range(1000000000) first, range(1000000000) second where first.range % 7 = second.range % 11"


@pytest.mark.parametrize("name", FILTERS)
async def test_every_filter_leaves_the_rows_that_the_log_has_of_it(name: str, client: Client, storage: Path) -> None:
    value, meets = FILTERS[name]
    found = await client.rows(**{name: value, "where": value if name == "where" else "source = 'usual'", "limit": 200})
    assert {row["experience_id"] for row in found["rows"]} == {
        row["experience_id"] for row in every_row(storage) if meets(row)
    }
    assert found["count"] == len(found["rows"])


def test_no_filter_is_left_out() -> None:
    [(model, _)] = [query for view in VIEWS for name, query in view.QUERIES.items() if name == "rows"]
    assert model.model_fields.keys() - {"run", "sort", "offset", "limit"} == FILTERS.keys()


async def test_rows_come_in_the_order_and_the_pages_that_are_asked_for(client: Client) -> None:
    async def page(**asked: Any) -> list[dict[str, Any]]:
        return (await client.rows(group_status="trained", **asked))["rows"]

    shown = ("reward", "tokens", "staleness", "version", "step", "logprob", "source", "status", "task_id")
    for sort in (*shown, "finished_at", "group_deviation"):
        up, down = await page(sort=sort, limit=200), await page(sort=f"-{sort}", limit=200)
        assert len(up) == 12 * GROUPS * ROWS and {row["experience_id"] for row in up} == {
            row["experience_id"] for row in down
        }
        if sort in shown:
            assert [row[sort] for row in up] == sorted(row[sort] for row in up)
            assert [row[sort] for row in down] == sorted((row[sort] for row in down), reverse=True)
    pages = [await page(sort="tokens", limit=100), await page(sort="tokens", limit=100, offset=100)]
    assert [row["experience_id"] for part in pages for row in part] == [
        row["experience_id"] for row in await page(sort="tokens", limit=200)
    ]


async def test_a_row_comes_with_its_group_tokens_and_fate(client: Client, storage: Path) -> None:
    await client.rows()
    found = await client.ask("row", run="words", id="words/mix/0/task00/0")
    [row] = [each for each in every_row(storage) if each["experience_id"] == "words/mix/0/task00/0"]
    assert (found["step"], found["uses"], found["group_status"]) == (1, 1, "trained")
    assert [turn["role"] for turn in found["turns"]] == ["system", "user", "assistant", "tool", "assistant"]
    assert found["turns"][-1]["content"] == SCRIPT
    assert found["token_ids"] == row["token_ids"] and found["mask"] == row["action_mask"]
    assert found["logprobs"] == [pytest.approx(each) for each in row["logprobs"]]
    assert "".join(found["token_texts"]).startswith("Use the calculator")
    assert [each["experience_id"] for each in found["group"]] == [f"words/mix/0/task00/{at}" for at in range(ROWS)]
    assert found["advantage"] == pytest.approx(found["reward"] - sum(each["reward"] for each in found["group"]) / ROWS)
    assert found["components"]["form"] == 1.0
    assert found["trainer_gaps"] == {}
    run = await client.ask("run", run="words")
    widest = await client.ask("row", run="words", id=run["widest_gap"]["row"])
    assert run["widest_gap"]["step"] == widest["step"] == run["step"]
    assert widest["trainer_gaps"] == {str(widest["token_count"] - 1): -0.75}
    sibling = await client.ask("row", run="words", id="words/mix/0/task00/1")
    assert [(note["reward"], note["labels"]) for note in sibling["late_feedback"]] == [(1.0, {"quality": "good"})]
    late = (await client.rows(drop_reason="late"))["rows"][0]
    dropped = await client.ask("row", run="words", id=late["experience_id"])
    assert (dropped["group_status"], dropped["step"], dropped["drop_reason"]) == ("dropped", None, "late")
    demonstration = (await client.rows(source="expert"))["rows"][0]
    assert (await client.ask("row", run="words", id=demonstration["experience_id"]))["group_status"] == "demonstration"


async def test_images_of_rows_are_shown_and_no_other_files(client: Client) -> None:
    await client.rows()
    pictured = (await client.rows(where="images > 0"))["rows"][0]["experience_id"]
    image = await client.http.get("/v1/image", params={"run": "words", "id": pictured, "number": 0})
    assert image.headers["content-type"] == "image/png" and image.content.startswith(b"\x89PNG")
    assert (await client.refused("image", 404, run="words", id=pictured, number=1))[0] == "number"
    assert (await client.refused("image", 400, run="words", id=pictured, number=-1))[0] == "number"


async def test_tasks_are_counted_by_what_they_were_solved(client: Client, storage: Path) -> None:
    await client.rows()
    found = await client.ask("tasks", run="words")
    rows = every_row(storage)
    rates = {task["task_id"]: (task["tries"], task["passed"]) for task in found["tasks"]}
    for name in {row["task_id"] for row in rows}:
        rewards = [row["reward"] for row in rows if row["task_id"] == name]
        assert rates[name] == (len(rewards), sum(reward >= 1 for reward in rewards))
    assert found["counts"]["solved"] + found["counts"]["unsolved"] == found["counts"]["all"] == len(rates)
    assert {point["source"] for point in found["sources"]} == {"usual"}
    assert (await client.refused("tasks", run="words", least="nan"))[0] == "least"
    assert (await client.refused("tasks", run="words", offset=1 << 64))[0] == "offset"
    everything = await client.ask("tasks", run="words", least=2)
    assert everything["counts"]["unsolved"] == len(rates) and everything["counts"]["solved"] == 0


async def test_pass_rates_are_told_by_source_if_a_run_has_several(copied: Path) -> None:
    config = yaml.safe_load((copied / "words" / "config.yaml").read_text())
    [source] = config["tasks"]["sources"]
    config["tasks"]["sources"] = [{**source, "name": "short"}, source]
    (copied / "words" / "config.yaml").write_text(yaml.safe_dump(config))
    ids = {"training": [f"task{number:02d}" for number in range(6)], COUNTS: ["2", "4"]}
    (copied / "words" / TASKS_FILE).write_text(json.dumps(ids))
    client = Client(copied)
    await client.rows()
    found = await client.ask("tasks", run="words")
    added = "usual"  # task06 came later
    assert {each["source"] for each in found["sources"]} == {"short", source["dataset"], added}
    rows = [row for row in every_row(copied) if row["task_id"] < "task02" and row["reward"] is not None]
    of_version = {min(span["version"] for span in row["weight_versions"]) for row in rows}
    assert sum(each["source"] == "short" for each in found["sources"]) == len(of_version)


async def test_a_task_that_was_solved_before_and_is_no_more_is_unlearned(tmp_path: Path) -> None:
    def rewarded(good: set[str]) -> None:
        rows = [run.group() for _ in range(GROUPS)]
        run.buffer.put(
            [([row.with_fields(reward=float(row.task_id in good)) for row in group], None) for group in rows]
        )
        run.buffer.trained(run.steps, advance=True)
        run.steps += 1

    run = RecordedRun(tmp_path)
    for solved in ({"task01", "task02"}, {"task02", "task03"}):
        for _ in range(5):  # the seven tasks come twice
            rewarded(solved)
    run.close()
    client = Client(tmp_path)
    await client.rows()
    found = await client.ask("tasks", run="words", which="unlearned", before=4, after=9, span=5)
    assert [(task["task_id"], task["rate_before"], task["rate_after"]) for task in found["tasks"]] == [
        ("task01", 1.0, 0.0)
    ]


async def test_the_plan_of_a_recorded_run_is_the_one_of_its_config(storage: Path) -> None:
    client = Client(storage, reports=REPORTS)
    found = await client.ask("report", run="words")
    [stage] = [row for row in found["rows"] if "stage" in row]
    [asked] = load_run_config(storage / "words").stages
    assert found["problem"] == "" and (stage["stage"], stage["rows"]) == ("mix", asked.groups * asked.group_size)
    assert (await client.refused("report", run="words", name="plans"))[0] == "name"


async def test_what_is_not_known_is_refused_by_its_name(client: Client) -> None:
    assert await client.refused("rows", run="words", min_rewrd=1) == (
        "min_rewrd",
        "min_rewrd: Extra inputs are not permitted.",
    )
    assert (await client.refused("rows", run="words", min_reward="x"))[0] == "min_reward"
    assert (await client.refused("rows", run="words", sort="tokens; drop table rows"))[0] == "sort"
    assert (await client.refused("rows", run="words", limit=10**6))[0] == "limit"
    assert (await client.refused("rows"))[0] == "run"
    param, message = await client.refused("run", 404, run="word")
    assert param == "run" and "did you mean 'words'?" in message
    assert (await client.refused("run", 404, run="../words"))[0] == "run"
    assert (await client.refused("row", 404, run="words", id="words/mix/0"))[0] == "id"
    assert (await client.refused("compare", runs="words", axis="weeks"))[0] == "axis"


@pytest.mark.parametrize(
    "where",
    [
        "reward > ",
        "rewrd > 1",
        "sum(reward) > 1",
        "case when version > 9 then error(experience_id) else true end",
        "true; drop table rows",
        "true) or (true",
        "(select count(*) from read_text('/etc/passwd')) > 0",
        "(select count(*) from read_csv('/etc/passwd')) > 0",
    ],
)
async def test_a_condition_is_an_expression_over_rows_and_nothing_else(where: str, client: Client) -> None:
    param, message = await client.refused("rows", run="words", where=where)
    assert param == "where" and message.startswith("where: not a valid condition")
    assert (await client.rows(where="true"))["count"] > 0


async def test_a_condition_that_takes_too_long_is_refused(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    await client.rows()
    monkeypatch.setattr("rayrft.viewer.index._QUERY_S", 0.2)
    param, message = await client.refused("rows", run="words", where=f"(select count(*) from {ENDLESS}) > version")
    assert param == "where" and "nterrupt" in message


async def test_without_the_key_nothing_is_told(storage: Path) -> None:
    for key in ("", "sk-wrong"):
        client = Client(storage, key)
        for view in VIEWS:
            for name in view.QUERIES:
                assert (await client.refused(name, 401, run="words"))[1] == "Incorrect API key provided."
        assert (await client.refused("changes", 401))[0] is None
        missing = await client.http.get("/feedback/word/")
        assert missing.status_code == 404 and "words" not in missing.text
        page = await client.http.get("/")
        policy = page.headers["content-security-policy"]
        assert page.status_code == 200 and "script-src 'self'" in policy and "default-src 'none'" in policy


async def test_a_line_that_is_half_written_is_not_read_and_a_damaged_one_is_named(copied: Path) -> None:
    records = copied / "words" / "metrics.jsonl"
    whole = records.read_bytes()
    records.write_bytes(whole[:-20])
    assert (await Client(copied).ask("run", run="words"))["problems"] == []
    lines = whole.splitlines(keepends=True)
    records.write_bytes(b"".join([*lines[:5], b'{"kind": "st\n', *lines[6:]]))
    client = Client(copied)
    found = await client.ask("run", run="words")
    assert str(records) in found["problems"][0] and "damaged in the line at byte" in found["problems"][0]
    assert found["step"] == 2, "what stands before it is shown"
    (copied / "words" / "summary.json").write_text('{"name": ')
    assert any("summary.json" in problem for problem in (await client.ask("run", run="words"))["problems"])


@pytest.mark.parametrize("what", ["changed", "gone"])
async def test_a_segment_that_is_damaged_is_named(what: str, copied: Path) -> None:
    segment = copied / "words" / "buffer" / "segment-00000000.arrow"
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 0xFF
    segment.write_bytes(data) if what == "changed" else segment.unlink()
    found = await Client(copied).rows()
    [problem] = found["log"]["damaged"].values()
    assert problem.startswith(str(segment)) and "a backup" in problem
    assert {row["source"] for row in found["rows"]} == {"expert"}


async def test_a_journal_that_is_damaged_and_a_config_that_cannot_be_read_are_named(copied: Path) -> None:
    journal = copied / "words" / "buffer" / "journal-00000000.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join([lines[0], b"x" + lines[1], *lines[2:]]))
    client = Client(copied)
    assert "journal-00000000.jsonl, line 2" in (await client.rows())["log"]["problem"]
    journal.write_bytes(b"".join(lines))
    assert (await client.rows())["log"]["problem"] == "" and (await client.rows())["count"] > 100
    (copied / "words" / "config.yaml").write_text("name: words\nmodel: {pth: tiny}\n")
    assert "model.pth" in (await Client(copied).rows())["log"]["problem"]


async def test_what_a_running_run_adds_is_told_at_once_and_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RecordedRun(tmp_path)
    run.train(2)
    client = Client(tmp_path)
    first = await client.rows(group_status="trained")
    seen = (await client.ask("changes", run="words"))["seen"]
    waiting = asyncio.create_task(client.ask("changes", run="words", seen=seen))
    read: list[int] = []

    def counted(*given: Any) -> Any:
        batch = read_log_rows(*given)
        read.append(batch.num_rows)
        return batch

    monkeypatch.setattr("rayrft.viewer.index.read_log_rows", counted)
    run.train()
    assert (await waiting)["seen"] != seen
    found = await client.rows(group_status="trained")
    assert found["count"] == first["count"] + GROUPS * ROWS and sum(read) == GROUPS * ROWS
    assert (await client.ask("run", run="words"))["step"] == 3
    again = Client(tmp_path)
    assert (await again.rows(group_status="trained"))["count"] == found["count"] and sum(read) == GROUPS * ROWS
    run.close()


async def test_a_new_run_of_the_same_name_does_not_have_the_rows_of_the_old_one(copied: Path) -> None:
    client = Client(copied)
    assert (await client.rows(group_status="trained"))["count"] == 12 * GROUPS * ROWS
    (copied / "words").rename(copied / "words-before")
    short_run(copied, 14, seed=5)  # its files are longer than those of the old one
    for each in (client, Client(copied)):
        found = await each.rows(group_status="trained")
        assert found["count"] == 14 * GROUPS * ROWS and not found["log"]["damaged"]


async def test_a_run_that_was_resumed_is_told_as_its_file_is_now(copied: Path) -> None:
    client, records = Client(copied), copied / "words" / "metrics.jsonl"
    assert (await client.ask("run", run="words"))["step"] == 12
    lines = records.read_bytes().splitlines(keepends=True)
    records.unlink()
    records.write_bytes(b"".join(lines[:5]))
    assert (await client.ask("run", run="words"))["step"] < 5


async def test_a_run_folder_is_a_storage_of_one_run(storage: Path) -> None:
    assert [run["run"] for run in (await Client(storage / "words").ask("runs"))["runs"]] == ["words"]


async def test_an_explore_job_which_trains_nothing_gets_no_advice(copied: Path) -> None:
    records, client = copied / "words" / "metrics.jsonl", Client(copied)
    await client.rows()
    assert (await client.ask("advice", run="words"))["steps"] == 12
    records.write_text(
        records.read_text().replace('"step", "stage"', '"rollout", "stage"').replace("usual_rows", "rows")
    )
    assert (await client.ask("advice", run="words"))["steps"] == 0


async def test_the_first_question_and_the_last_answer_of_a_row_are_listed(tmp_path: Path) -> None:
    several = (
        ("system", "Be brief."),
        ("user", "first?"),
        ("assistant", "one"),
        ("user", "second?"),
        ("assistant", "é" * 300),
    )
    run = RecordedRun(tmp_path)
    rows = [
        replace(row, turns=tuple({"role": role, "content": text} for role, text in turns))
        for row, turns in zip(group(5, 3), (several, (), (("user", "alone?"),)), strict=True)
    ]
    run.buffer.put([(rows, None)])
    run.close()
    found = (await Client(tmp_path).rows(group_id="5", sort="reward"))["rows"]
    assert [(row["question"], row["answer"], row["turns"]) for row in found] == [
        ("first?", "é" * 200, 5),
        (None, None, 0),
        ("alone?", None, 1),
    ]


async def test_of_an_answer_that_a_resumed_run_writes_again_the_last_line_counts(copied: Path) -> None:
    task = Task.create("test", "What is two and two?", "4")
    writer, client = UnstoredAnswers(copied / "words", "explorer-0"), Client(copied)
    for written in (["Three", "Four"], ["Five"]):  # before the file is read for the first time, and after it
        for text in written:
            await writer.add_evaluated([task], [Attempt(task.id, 0, 1.0, response=text, versions=(9,))], 0.5)
        [row] = (await client.rows(group_status="evaluation"))["rows"]
        shown = await client.ask("row", run="words", id=row["experience_id"])
        assert row["answer"] == shown["turns"][-1]["content"] == text and len(shown["group"]) == 1


async def test_a_dropped_group_that_a_resumed_run_stores_is_shown_as_it_is_in_the_log(tmp_path: Path) -> None:
    run, rows = RecordedRun(tmp_path), group(5, 3)
    writer, client = UnstoredAnswers(tmp_path / "words", "explorer-0"), Client(tmp_path)

    async def statuses() -> list[str]:
        return [row["group_status"] for row in (await client.rows(group_id=rows[0].group_id))["rows"]]

    for status in ("dropped", "ready"):  # lines that come after the group was stored are left out, too
        await writer.add_dropped(Task.create("test", "How many?", "4"), rows, Counter(late=1))
        assert await statuses() == [status] * 3
        if status == "dropped":
            run.buffer.put([(rows, None)])
            assert await statuses() == ["ready"] * 3
    run.close()


async def test_answers_that_the_buffer_did_not_store_are_found_with_their_reason(copied: Path) -> None:
    task = Task.create("test", "What is two and two?", "4")
    said = ({"role": "assistant", "content": SCRIPT},)
    rows = [replace(row, turns=said, reward=0.0, weight_versions=(VersionSpan(1, 4, 5),)) for row in group(7)]
    writer, client = UnstoredAnswers(copied / "words", "explorer-0"), Client(copied)
    before = await client.rows()
    await writer.add_dropped(task, rows, Counter(zero_variance=1, reward_unknown=1))
    with (copied / "words" / "answers" / "explorer-0.000000.jsonl").open("a") as file:
        file.write("torn by a crash\n")
    attempts = [
        Attempt(task.id, number, float(number), response=f"It is {number}.", tokens=4, versions=(9,))
        for number in (0, 1)
    ]
    await writer.add_evaluated([task], attempts, 0.5)

    found = await client.rows(drop_reason="zero_variance")
    assert [row["answer"] for row in found["rows"]] == [SCRIPT] * len(rows) and found["log"]["damaged"] == {}
    assert (await client.rows())["count"] == before["count"] + len(rows), "answers of evaluations are measured apart"
    row = await client.ask("row", run="words", id=rows[0].experience_id)
    assert (row["group_status"], row["drop_reason"]) == ("dropped", "zero_variance") and row["token_count"] == 0
    assert [turn["content"] for turn in row["turns"]] == [task.question, SCRIPT] and len(row["group"]) == len(rows)

    found = await client.rows(group_status="evaluation", sort="reward", where="metrics['temperature'] = 0.5")
    assert [(row["version"], row["reward"], row["answer"]) for row in found["rows"]] == [
        (9, 0.0, "It is 0."),
        (9, 1.0, "It is 1."),
    ]
    assert found["means"]["groups"] == 1 and "evaluation" in found["log"]["choices"]["group_status"]
    tasks = await client.ask("tasks", run="words", which="unsolved")
    [never] = [each for each in tasks["tasks"] if each["task_id"] == task.id]
    assert (never["tries"], never["curve"]) == (len(rows), [[5, 0.0]]), "attempts of evaluations do not count"
    (copied / "words" / "answers" / "explorer-0.000000.jsonl").write_text("")
    assert (await client.rows(drop_reason="zero_variance"))["count"] == 0, "the file of a new run"
