"""Pipelines on files: rows stream through in a process that can be killed, and what becomes of each is told."""

from __future__ import annotations

import json
from collections import Counter
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset
from typer.testing import CliRunner

from rayrft.buffer.export import read_file
from rayrft.cli.main import app
from rayrft.config import PipelineConfig, read_config
from rayrft.data.tables import TableWriter, open_table, write_table
from rayrft.errors import ConfigError, DataError, OperatorFailed, OperatorTimeout
from rayrft.experience import Experience, Task, to_batch
from rayrft.pipelines.files import process, walk_lineage
from rayrft.pipelines.report import OperatorLog, OperatorStats
from rayrft.pipelines.rows import Ids
from tests.buffer.rows import group
from tests.errors import about
from tests.pipelines.small import OWN, applied, left_out, linked, operator, processed, read, rows, run, write

pytestmark = pytest.mark.usefixtures("forked_templates")


def questions(count: int) -> list[dict[str, Any]]:
    return [{"question": f"question {number}", "answer": str(number)} for number in range(count)]


def test_rows_go_through_all_operators_and_are_counted(tmp_path: Path) -> None:
    given = [*questions(25), {"question": "question 3", "answer": "3"}, {"question": " ", "answer": "x"}]
    options = {"expression": {"where": "answer::int < 20"}, "top_share": {"share": 0.5}}
    names = ["drop_broken", "exact_duplicates", "shout", "expression", "vowels", "top_share", "mirror"]
    operators = [{"name": name, **options.get(name, {})} for name in names]
    found, done = run(given, tmp_path, operators, batch_rows=4)
    assert [row["question"] for row in found if not row["made_by"]] == [f"QUESTION {number}!" for number in range(10)]
    made = [row for row in found if row["made_by"]]
    assert [row["question"] for row in made] == [f"!{str(number)[::-1]} NOITSEUQ" for number in range(10)]
    assert [each.name for each in done.reports] == names
    counts = [(each.taken, each.given, each.changed, each.made) for each in done.reports]
    assert counts[:4] == [(27, 26, 0, 0), (26, 25, 0, 0), (25, 25, 25, 0), (25, 20, 0, 0)]
    assert counts[4:] == [(20, 20, 0, 0), (20, 10, 0, 0), (10, 20, 0, 10)]
    assert left_out(done) == {
        "drop_broken: no question": 1,
        "exact_duplicates: duplicate": 1,
        "expression: not answer::int < 20": 5,
        "top_share: below the top share": 10,
    }
    gone = read(tmp_path / "left_out.jsonl")
    assert len(gone) == 17 and gone[0]["row"]["question"] == " "
    assert all(each.seconds > 0 for each in done.reports)
    assert done.rows == 20


def test_the_result_does_not_depend_on_the_size_of_batches(tmp_path: Path) -> None:
    rows = enumerate(questions(60))
    given = [{**row, "group_id": str(number % 5), "reward": float(number % 3)} for number, row in rows]
    operators = [{"name": "near_duplicates", "threshold": 0.9}, {"name": "reward_deviation"}]
    operators += [{"name": "pass_rate", "by": "group_id"}, {"name": "mirror"}, {"name": "novelty"}]
    results = [sorted(run(given, tmp_path, operators, batch_rows=size)[0], key=str) for size in (7, 1000)]
    assert results[0] == results[1] and len(results[0]) == 120


@pytest.mark.parametrize("size", [2, 8])
def test_groups_are_whole_though_their_rows_are_scattered(size: int, tmp_path: Path) -> None:
    given = [{"question": "q", "group_id": name, "reward": float(number)} for number, name in enumerate("abcabcabcabd")]
    given.append({"question": "q", "group_id": None, "reward": 7.0})
    found, _ = run(given, tmp_path, [{"name": "reward_deviation"}], batch_rows=size)
    assert [row["group_id"] for row in found] == [*"aaaabbbbccc", "d", None]
    deviation = {row["group_id"]: row["priority"] for row in found}
    assert deviation["a"] == deviation["b"] == pytest.approx(3.354, abs=1e-3)
    assert deviation["c"] == pytest.approx(2.449, abs=1e-3) and deviation["d"] == deviation[None] == 0


def test_broken_rows_are_counted_and_listed_and_no_row_is_an_empty_file(tmp_path: Path) -> None:
    given = [questions(1)[0], "{not json", '["a list"]', '{"question": "\\ud800"}', "", questions(2)[1]]
    found, done = run(given, tmp_path, [{"name": "drop_broken"}])
    assert [row["answer"] for row in found] == ["0", "1"]
    [broken] = done.broken.values()
    reasons = {number: problem.partition(" (")[0] for number, problem in broken.items()}
    assert reasons == {2: "not JSON", 3: "not a JSON object", 4: "not valid Unicode"}
    assert [entry["number"] for entry in read(tmp_path / "left_out.jsonl")] == [2, 3, 4]
    found, done = run(questions(3), tmp_path, [{"name": "expression", "where": "false"}, {"name": "novelty"}])
    assert found == [] and done.rows == 0
    assert done.reports[1].taken == 0


def test_values_that_operators_do_not_read_come_through_as_they_were(tmp_path: Path) -> None:
    odd = {"meta": {"x": [1, {"y": None}]}, "label": "A", "n": 1, "big": 1 << 80, "tags": []}
    other = {"meta": {}, "label": ["A", "B"], "n": 2.5, "big": 1, "tags": ["t"]}
    given = [{**row, **more} for row, more in zip(questions(2), (odd, other), strict=True)]
    found, _ = run(given, tmp_path, [{"name": "shout"}])
    for before, after in zip(given, found, strict=True):
        assert {name: after[name] for name in before} == {**before, "question": before["question"].upper() + "!"}


def test_duplicates_are_found_across_files(tmp_path: Path) -> None:
    out, operator = tmp_path / "out.jsonl", {"name": "exact_duplicates"}
    one = write(tmp_path / "one.jsonl", questions(3))
    new = [{**questions(2)[1], "level": 5}, {"question": "new", "answer": "9", "level": 6}]
    two = write(tmp_path / "two.jsonl", new)
    processed([one, two], out, operator)
    assert [(row["answer"], row["level"]) for row in read(out)] == [("0", None), ("1", None), ("2", None), ("9", 6)]
    three = write(tmp_path / "three.jsonl", [{"question": 5, "answer": "1", "level": "high"}])
    processed([one, three], out, operator)
    assert read(out)[-1]["question"] == "5", "operators read it as text"
    with pytest.raises(DataError, check=about("column level")):
        processed([two, three], out, operator)


ODD = [*({"question": f"question {each}", "answer": "2"} for each in range(4)), {"question": "q", "answer": 5}]
ODD += [{"question": "r", "answer": ["2", "3"]}, {"question": "s", "answer": None}]


@pytest.mark.parametrize("name", ["normalise", "shout"])
def test_an_odd_value_stops_no_file(name: str, tmp_path: Path) -> None:
    found, done = run(ODD, tmp_path, [{"name": name}])
    if name == "shout":
        assert [row["answer"] for row in found] == [row["answer"] for row in ODD], "it does not read the answers"
        return
    assert [row["answer"] for row in found] == ["2", "2", "2", "2", "5", None]
    [broken] = done.broken.values()
    assert broken == {6: 'not usable: answer holds ["2", "3"], which is not a text'}
    with pytest.raises(DataError, match=r"line 6: not usable: answer holds"):
        run(ODD, tmp_path, [{"name": name}], on_broken="fail")


def test_an_operator_gets_and_gives_json_and_is_named_with_the_row_where_it_does_not(tmp_path: Path) -> None:
    found, _ = run(ODD, tmp_path, [{"name": "praise"}])
    assert [row["answer"] for row in found] == ["2!", "2!", "2!", "2!", "5!", "['2', '3']!", "None!"]
    with pytest.raises(OperatorFailed, check=about("operators.0.writes_no_json")) as raised:
        run([{"id": f"row {at}", **row} for at, row in enumerate(ODD)], tmp_path, [{"name": "writes_no_json"}])
    assert "row row 3, column 'answer': it wrote 'no JSON'" in raised.value.problem
    assert str(raised.value).count("orrect the operator") == 1


def test_rows_of_another_layout_are_renamed_taken_apart_and_converted(tmp_path: Path) -> None:
    def verl(number: int, **changes: Any) -> dict[str, Any]:
        prompt = [{"role": "user", "content": f"{number} + 1?"}]
        return {"prompt": prompt, "reward_model": {"ground_truth": number + 1}, "level": str(number), **changes}

    given = [verl(0), verl(1), verl(2, level="x"), verl(3, reward_model={}), verl(4, reward_model={"style": "rule"})]
    take = {"prompt.0.content": "question", "reward_model.ground_truth": "answer", "level": "difficulty"}
    options = {"rename": take, "cast": {"difficulty": "integer"}, "drop": ["prompt", "reward_model"]}
    found, done = run(given, tmp_path, [{"name": "columns", **options}, {"name": "normalise"}])
    expected = [{"question": f"{each} + 1?", "answer": str(each + 1), "difficulty": each} for each in range(2)]
    assert [{name: row[name] for name in row if name != "id"} for row in found] == expected
    reasons = {"columns: level is not integer": 1, "columns: no reward_model.ground_truth": 2}
    assert left_out(done) == reasons
    nested, _ = applied("columns", Ids().add(pa.RecordBatch.from_pylist(given[:2])), **options)
    assert [{name: row[name] for name in row if name != "id"} for row in nested] == expected, "of Parquet, too"
    for wrong in ({"rename": {"promt.0": "q"}}, {"drop": ["q"]}, {"drop": ["id"]}):
        with pytest.raises(ConfigError, check=about(f"operators.0.{next(iter(wrong))}")):
            run(given, tmp_path, [{"name": "columns", **wrong}])


@pytest.mark.parametrize("name", ["raises", "hangs", "dies"])
def test_an_operator_that_fails_is_named_and_nothing_is_written(name: str, tmp_path: Path) -> None:
    error, deadline_s = (OperatorTimeout, 5) if name == "hangs" else (OperatorFailed, 60)
    given = [*questions(5), {"question": "bad", "answer": "x"}]
    (tmp_path / "out.jsonl").write_text("old")
    with pytest.raises(error, check=about(f"operators.1.{name}")) as raised:
        run(given, tmp_path, [{"name": "size"}, {"name": name}], batch_rows=5, deadline_s=deadline_s)
    if name == "raises":
        assert "KeyError" in raised.value.problem and "no such thing" in raised.value.problem
        bad = Ids().add(pa.RecordBatch.from_pylist([given[-1]])).column("id")[0]
        assert f"row {bad}: it raised KeyError" in raised.value.problem
    assert (tmp_path / "out.jsonl").read_text() == "old"
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", "out.jsonl"}


@pytest.mark.parametrize("rest", [{"id": "x"}, {"id": "7"}, {}])
def test_ids_of_several_kinds_become_texts(rest: dict[str, Any], tmp_path: Path) -> None:
    file = write(tmp_path / "in.jsonl", [{"id": 1, "question": "q"}, {"id": "y", "question": "r"}, {**rest, "a": 1}])
    found = Ids()
    [batch] = [found.add(batch) for batch in open_table(file).batches(10)]
    assert write_table(tmp_path / "out.jsonl", batch.schema, [batch]) == 3
    assert [row["id"] for row in read(tmp_path / "out.jsonl")][: 2 + len(rest)] == ["1", "y", *rest.values()]


def test_what_json_does_not_have_is_written_as_null_or_text_and_bytes_are_refused(tmp_path: Path) -> None:
    nan, at = float("nan"), {"at": datetime(2026, 1, 2), "spent": Decimal("1.50"), "in": [{"day": date(2026, 1, 3)}]}
    table = pa.Table.from_pylist([{"x": 1.5, "many": [float("inf"), 2.0], "y": {"z": nan}, **at}, {"x": nan}])
    write_table(tmp_path / "out.jsonl", table.schema, table.to_batches())
    first, second = read(tmp_path / "out.jsonl")
    numbers, times = {"x": 1.5, "many": [None, 2.0], "y": {"z": None}}, {"at": "2026-01-02 00:00:00", "spent": "1.50"}
    assert first == {**numbers, **times, "in": [{"day": "2026-01-03"}]} and second == dict.fromkeys(first)
    for kind in (pa.binary(), pa.list_(pa.large_binary()), pa.map_(pa.string(), pa.binary(3))):
        with pytest.raises(DataError, check=about("column raw")):
            TableWriter(tmp_path / "bytes.jsonl", pa.schema({"raw": kind}))
        TableWriter(tmp_path / "bytes.parquet", pa.schema({"raw": kind}))


def test_a_damaged_parquet_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "in.parquet"
    pq.write_table(pa.table({"question": [f"question {number}" for number in range(10_000)]}), file)
    content = bytearray(file.read_bytes())
    content[4:400] = bytes(396)
    file.write_bytes(content)
    with pytest.raises(DataError, check=about("file", str(file))):
        list(open_table(file).batches(100))


def test_rows_on_which_an_operator_failed_count_as_left_out_if_they_are() -> None:
    for gone in (0, 5):
        links = linked(rows(question=["q"]), operator("language_mixing", column="question"))
        log = OperatorLog(links, "operators")
        log.fail(OperatorFailed("it died", field=links[0].field), 5, gone)
        assert log.take() == {"language_mixing": OperatorStats(taken=5, left_out=gone, failed=gone)}


def test_a_pipeline_file_is_checked(tmp_path: Path) -> None:
    file = tmp_path / "pipeline.yaml"
    file.write_text("operators: [{name: normalise}]\nbatchrows: 3\n")
    with pytest.raises(ConfigError, match="Did you mean 'batch_rows'"):
        read_config(PipelineConfig, file)
    file.write_text("operators: []\n")
    with pytest.raises(ConfigError, check=about("operators")):
        read_config(PipelineConfig, file)
    with pytest.raises(ConfigError, check=about("config")):
        read_config(PipelineConfig, tmp_path / "nowhere.yaml")


def test_lineage_is_walked_over_files_whose_columns_may_differ(tmp_path: Path) -> None:
    first = tmp_path / "first.jsonl"
    processed([write(tmp_path / "in.jsonl", questions(2))], first, {"name": "mirror"})
    processed([first], tmp_path / "second.jsonl", {"name": "mirror"})
    made = {row["id"] for row in read(first) if row["parents"]}
    child = next(row for row in read(tmp_path / "second.jsonl") if made & {*(row["parents"] or ())})
    walked = walk_lineage(child["id"], [open_table(tmp_path / "second.jsonl")])
    assert [(each.depth, each.made_by) for each in walked] == [(0, "mirror/1"), (1, "mirror/1"), (2, None)]
    assert walked[2].row is not None and walked[2].row["question"] == child["question"]
    lonely = write(tmp_path / "lonely.jsonl", [child])
    assert [each.row is None for each in walk_lineage(child["id"], [open_table(lonely)])] == [False, True]
    with pytest.raises(DataError, check=about("id", "nobody")):
        walk_lineage("nobody", [open_table(first)])
    one = write(tmp_path / "one.jsonl", [{"question": "ab", "answer": "1", "level": 3}] * 2)
    two = write(tmp_path / "two.jsonl", [{"level": 0.5, "answer": "2", "question": "cd", "hint": "e"}])
    processed([one, two], tmp_path / "out.jsonl", {"name": "mirror"}, batch_rows=1)
    made = [row for row in read(tmp_path / "out.jsonl") if row["parents"]]
    only_made = write(tmp_path / "made.jsonl", made)
    for row, question, source in zip(made, ("ab", "ab", "cd"), (one, one, two), strict=True):
        _, parent = walk_lineage(row["id"], [open_table(only_made), open_table(source)])
        assert parent.row is not None and parent.row["question"] == question


def call(*arguments: Any) -> str:
    result = CliRunner().invoke(app, ["data", *map(str, arguments)], catch_exceptions=False, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_command_reads_what_tasks_are_read_from(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    rows = [{"question": f"{number}", "answer": number} for number in range(3)]
    (tmp_path / "a.csv").write_text("question,answer\nq 0,0\nq 1,1\nbroken\n")
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "folder" / "b.parquet")
    pq.write_table(pa.Table.from_pylist(rows[:1]), tmp_path / "folder" / "c.parquet")
    Dataset.from_list(rows[1:]).save_to_disk(tmp_path / "saved")
    pipeline = tmp_path / "pipeline.yaml"
    pipeline.write_text("operators: [{name: drop_broken, columns: [question]}]\n")
    out = tmp_path / "out.jsonl"
    given = [tmp_path / name for name in ("a.csv", "folder", "saved")]
    assert "1 broken rows of" in call("process", *given, out, "--pipeline", pipeline)
    expected = [("q 0", 0), ("q 1", 1), ("0", 0), ("1", 1), ("2", 2), ("0", 0), ("1", 1), ("2", 2)]
    assert [(row["question"], row["answer"]) for row in read(out)] == expected
    rows_of_the_hub = [{"dataset": str(tmp_path / "saved")}, {"path": str(tmp_path / "folder")}]
    pipeline.write_text(json.dumps({"operators": [{"name": "drop_broken", "columns": ["question"]}]}))
    with pytest.raises(DataError, match="no rows to process"):
        CliRunner().invoke(app, ["data", "process", str(out), "--pipeline", str(pipeline)], catch_exceptions=False)
    pipeline.write_text(json.dumps({**json.loads(pipeline.read_text()), "rows": rows_of_the_hub}))
    call("process", out, "--pipeline", pipeline)
    assert [row["answer"] for row in read(out)] == [1, 2, 0, 1, 2, 0]
    pq.write_table(pa.table({"other": [1]}), tmp_path / "folder" / "d.parquet")
    with pytest.raises(DataError, match=r"d\.parquet has other columns", check=about("file", str(given[1]))):
        open_table(given[1])


def test_the_command_prints_counts_and_samples(tmp_path: Path) -> None:
    given = [*questions(3), "broken", {"question": "a much longer question", "answer": "x"}]
    source, pipeline, out = write(tmp_path / "in.jsonl", given), tmp_path / "pipeline.yaml", tmp_path / "out.jsonl"
    operators = "[{name: brief, limit: 12}, {name: shout, mark: '?'}, {name: mirror}]"
    pipeline.write_text(f"plugins: [{OWN}]\noperators: {operators}\n")
    printed = call("process", source, out, "--pipeline", pipeline)
    lines = {line.split()[0]: line.split() for line in printed.splitlines() if line.strip()}
    assert lines["brief"][:1] == ["brief"] and "1 too long" in printed
    assert "'question 0' -> 'QUESTION 0?'" in printed
    assert "left out" in printed and "a much longer question" in printed
    assert "1 broken rows" in printed and "4 (not JSON" in printed
    assert "6 rows in" in printed
    made = next(row for row in read(out) if row["parents"])
    lineage = call("lineage", made["id"], out)
    assert lineage.splitlines()[0].startswith(f"{made['id']} by mirror/1: ")
    assert lineage.splitlines()[1].startswith(f"  {made['parents'][0]}: ")


def test_exported_experiences_are_processed_in_both_formats(tmp_path: Path) -> None:
    turns = ({"role": "user", "content": "Hi"},)
    batch = to_batch([row.with_fields(turns=turns) for number in range(3) for row in group(number, 3)])
    for suffix in ("jsonl", "parquet"):
        source, out = tmp_path / f"in.{suffix}", tmp_path / f"out.{suffix}"
        write_table(source, batch.schema, [batch])
        assert processed([source], out, {"name": "best_against_worst"}, {"name": "reward_deviation"}).rows == 6
        table = read_file(out)
        assert table.column("chosen").to_pylist() == [True, False] * 3
        labels = map(dict, table.column("labels").to_pylist())
        assert [each["made_by"] for each in labels] == ["best_against_worst/1"] * 6
        walked = walk_lineage(table.column("experience_id")[0].as_py(), [open_table(out), open_table(source)])
        assert [each.id for each in walked][1:] == ["0/2"]


def test_operators_on_groups_and_on_batches_are_tried_on_the_rows_of_a_run(tmp_path: Path) -> None:
    def spoken(row: Experience, said: str, **changes: Any) -> Experience:
        turns = ({"role": "user", "content": "Hi"}, {"role": "assistant", "content": said})
        return row.with_fields(turns=turns, **changes)

    own = [spoken(row, f"answer {number}") for number in range(4) for row in group(number, 2)]
    expert = [spoken(row, "gold", source="expert", experience_id=f"gold/{at}") for at, row in enumerate(own)]
    masked = [spoken(row, "cut", status="masked") for row in group(9, 2)]
    batch = to_batch([*own, *expert, *masked])
    steps = pa.array([None, None, *([3] * 6), *([3] * 4), *([4] * 4), 3, 3], pa.int64())
    schema = batch.schema.append(pa.field("trained_step", steps.type))
    source = tmp_path / "in.parquet"
    write_table(source, schema, [pa.RecordBatch.from_arrays([*batch.columns, steps], schema=schema)])
    operators = [
        operator("rebalance", expert_share=0.25),
        operator("reweight", by=0.5, where="source = 'expert' and trained"),
        operator("expression", where="response in ('gold', 'answer 3') and question = 'What?'"),
    ]
    config = PipelineConfig(operators=operators, batch_rows=5)
    tasks = {row.task_id: Task(row.task_id, "What?", "That") for row in own}
    done = process([open_table(source)], config, tmp_path / "out.parquet", tasks=tasks)
    rebalanced, reweighted, _ = done.reports
    assert rebalanced.reasons == {"over the share of expert rows": 2}, "two expert rows stay beside six own ones"
    assert reweighted.changed == 6
    written = pq.read_table(tmp_path / "out.parquet")
    assert written.schema.names == schema.names
    assert Counter(row.split("/")[0] for row in written.column("experience_id").to_pylist()) == {"3": 2, "gold": 6}
    with pytest.raises(ConfigError, match="question"):
        process([open_table(source)], config, tmp_path / "out.parquet")


def test_files_that_are_read_or_cannot_be_written_are_refused_before_anything_runs(tmp_path: Path) -> None:
    source = open_table(file := write(tmp_path / "in.jsonl", questions(2)))
    config = PipelineConfig(operators=[operator("drop_broken")])
    for name in ("nowhere/out.jsonl", "nowhere/out.parquet", "out.csv"):
        with pytest.raises(DataError, check=about("file", str(tmp_path / name))):
            process([source], config, tmp_path / name)
    with pytest.raises(DataError, check=about("left_out")):
        process([source], config, tmp_path / "out.jsonl", left_out=tmp_path / "nowhere" / "gone.jsonl")
    for out, gone in ((file, None), (tmp_path / "out.jsonl", tmp_path / "." / "in.jsonl")):
        with pytest.raises(DataError, check=about("out")):
            process([source], config, out, left_out=gone)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"] and read(file) == questions(2)


def test_rows_on_which_an_operator_raises_are_left_out_if_asked_for(tmp_path: Path) -> None:
    given = [*questions(5), {"question": "bad", "answer": "x"}, *questions(2)]
    found, done = run(given, tmp_path, [{"name": "raises"}, {"name": "mirror"}], on_error="leave_out", batch_rows=4)
    assert [row["answer"] for row in found if not row["made_by"]] == ["0", "1", "2", "3", "4", "0", "1"]
    assert left_out(done) == {"raises: raised KeyError": 1}
    [gone] = read(tmp_path / "left_out.jsonl")
    assert gone["row"]["question"] == "bad" and "no such thing" in gone["reason"]
    assert (done.reports[0].taken, done.reports[0].given) == (8, 7)
    found, _ = run([given[5]], tmp_path, [{"name": "raises"}], on_error="leave_out")
    assert found == []


def test_proposed_tests_of_code_are_kept_where_right_solutions_pass_them(tmp_path: Path) -> None:
    calls = [{"args": [2, 3], "expected": 5}, {"args": [2, 3], "expected": 6}, {"args": ["a", "b"], "expected": "ab"}]
    solutions = ["def add(a, b):\n    return a + b", "def add(a, b):\n    return int(a) + int(b)"]
    tried = [(calls, solutions[:1]), (calls, solutions), (calls[1:2], solutions[:1]), (calls, [])]
    add = {"question": "add", "entry_point": "add"}
    given = [{**add, "candidate_tests": tests, "solutions": known} for tests, known in tried]
    found, _ = run(given, tmp_path, [{"name": "checked_tests"}], deadline_s=60)
    assert [json.loads(row["tests"]) for row in found] == [[calls[0], calls[2]], [calls[0]]]
    assert [row["reason"] for row in read(tmp_path / "left_out.jsonl")] == ["too few tests hold"] * 2
