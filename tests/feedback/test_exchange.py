"""Files of what people said: to train on, and for other annotation tools and back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rayrft.config.demonstrations import RowFormat
from rayrft.config.serve import FeedbackConfig
from rayrft.data.conversations import read_conversations
from rayrft.errors import DataError
from rayrft.feedback.exchange import FORMATS, LABEL_TOOLS, read_feedback, write_feedback
from rayrft.feedback.items import ShownAnswer
from rayrft.feedback.judgements import Judgement, JudgementAdded, Judgements
from tests.conftest import ROOT
from tests.errors import about
from tests.feedback.scripted import group

SAMPLES = ROOT / "tests" / "samples"
SETTINGS = FeedbackConfig()
ANSWERS: dict[str, ShownAnswer] = {each.experience_id: each for each in group("g", "a", "b\u2028", "c").answers}
TURN = {"role": "user", "content": "Question g?"}

SAID = [
    Judgement("1", "Ann", "one:g/0", "one", ("g/0",), score=4, labels=("polite",), comment="ü\nline", seconds=2.0),
    Judgement("2", "Bob", "one:g/0", "one", ("g/0",), thumb="down", edit="Better."),
    Judgement("3", "Ann", "pair:g", "pair", ("g/2", "g/0"), ranking=("g/2", "g/0")),
    Judgement("4", "Bob", "pair:g", "pair", ("g/0", "g/2"), tie=True),
    Judgement("5", "Cem", "group:g", "group", ("g/1", "g/0", "g/2"), ranking=("g/2", "g/0", "g/1")),
]


def known(given: Sequence[Judgement] = SAID) -> Judgements:
    return Judgements(SETTINGS, map(JudgementAdded, given))


def exported(path: Path, form: str, given: Sequence[Judgement] = SAID) -> list[dict[str, Any]]:
    written, missing = write_feedback(known(given), ANSWERS, path, form)
    rows = [json.loads(line) for line in path.read_bytes().split(b"\n") if line]
    assert written == len(rows) and not missing
    return rows


def test_picks_and_rankings_become_preference_pairs_as_most_people_have_them(tmp_path: Path) -> None:
    rows = exported(tmp_path / "pairs.jsonl", "pairs")
    found = [(row["chosen"], row["rejected"], row["votes"]) for row in rows]
    assert found == [("c", "a", [2, 0]), ("c", "b\u2028", [1, 0]), ("a", "b\u2028", [1, 0])]
    read = read_conversations(rows[0], RowFormat())
    assert read.layout.startswith("TRL preference: ") and read.paired
    assert [(side.chosen, side.messages) for side in read.sides] == [
        (True, [TURN, {"role": "assistant", "content": "c"}]),
        (False, [TURN, {"role": "assistant", "content": "a"}]),
    ]
    against = Judgement("6", "Dan", "pair:g", "pair", ("g/0", "g/2"), ranking=("g/0", "g/2"))
    outvoted = exported(tmp_path / "pairs.jsonl", "pairs", [SAID[2], against])
    assert outvoted == [], "one to one is no preference"


def test_pairs_that_differ_before_the_last_answer_are_whole_conversations(tmp_path: Path) -> None:
    turns = (TURN, {"role": "assistant", "content": "hm"}, TURN, ANSWERS["g/2"].turns[1])
    longer = replace(ANSWERS["g/2"], turns=turns)
    done = write_feedback(known(SAID[2:3]), ANSWERS | {"g/2": longer}, tmp_path / "pairs.jsonl", "pairs")
    row = json.loads((tmp_path / "pairs.jsonl").read_text())
    chosen, rejected = (side.messages for side in read_conversations(row, RowFormat()).sides)
    assert done == (1, 0) and len(chosen) == 4 and [turn["content"] for turn in rejected] == ["Question g?", "a"]


def test_edits_scores_and_thumbs_become_rows_to_train_on(tmp_path: Path) -> None:
    [edited] = exported(tmp_path / "rows.jsonl", "answers")
    [side] = read_conversations(edited, RowFormat()).sides
    assert (side.chosen, side.messages) == (None, [TURN, {"role": "assistant", "content": "Better."}])
    [labelled] = exported(tmp_path / "rows.jsonl", "labelled")
    assert (labelled["response"], labelled["label"], labelled["id"]) == ("a", False, "g/0")
    scores = {row["experience_id"]: row["reward"] for row in exported(tmp_path / "rows.jsonl", "scores")}
    assert scores == {"g/0": pytest.approx((0.75 + 0.0 + 0.5) / 3), "g/1": 0.0, "g/2": 1.0}


def as_read(given: Sequence[Judgement], tool: str) -> list[Judgement]:
    rest = {} if tool == "label_studio" else {"seconds": 0.0}  # Argilla keeps no times
    read = (replace(each, id="", given_at=0.0, rows=tuple(sorted(each.rows)), **rest) for each in given)
    return sorted(read, key=repr)


@pytest.mark.parametrize("tool", LABEL_TOOLS)
def test_what_goes_to_another_tool_comes_back_as_it_was(tool: str, tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    records = exported(path, tool)
    assert len(records) == 3, "one record of each item"
    found = read_feedback(path, tool, ANSWERS, SETTINGS)
    assert as_read(found, tool) == as_read(SAID, tool)
    again = read_feedback(path, tool, ANSWERS, SETTINGS)
    assert [each.id for each in again] == [each.id for each in found], "a second time it is the same"
    path.write_text(json.dumps(records))
    assert len(read_feedback(path, tool, ANSWERS, SETTINGS)) == len(SAID), "one JSON list, as the tools write it"


def test_what_label_studio_itself_exports_of_our_tasks_is_what_people_said() -> None:
    found = read_feedback(SAMPLES / "label_studio.json", "label_studio", ANSWERS, SETTINGS)
    assert as_read(found, "label_studio") == as_read(SAID, "label_studio")


def test_records_are_those_of_the_tools(tmp_path: Path) -> None:
    one, pair, ranked = exported(tmp_path / "a.jsonl", "argilla")
    assert one.keys() == {"id", "fields", "metadata", "suggestions", "responses", "vectors", "_server_id"}
    assert one["fields"] == {"prompt": "Question g?", "response": "a"}
    assert [answer["value"] for answer in one["responses"]["score"]] == [4]
    assert [answer["value"] for answer in pair["responses"]["better"]] == ["response_b", "tie"]
    assert ranked["responses"]["ranking"][0]["value"] == ["response_c", "response_a", "response_b"]
    one, pair, ranked = exported(tmp_path / "l.jsonl", "label_studio")
    first = one["annotations"][0]["result"]
    assert [(part["from_name"], part["type"], part["value"]) for part in first] == [
        ("score", "rating", {"rating": 4}),
        ("labels", "choices", {"choices": ["polite"]}),
        ("comment", "textarea", {"text": ["ü\nline"]}),
    ]
    picked, ordered = pair["annotations"][0]["result"][0], ranked["annotations"][0]["result"][0]
    assert (picked["from_name"], picked["to_name"], picked["value"]) == ("better", "better", {"selected": "right"})
    assert ordered["value"] == {"ranker": {"ranking": ["g/2", "g/0", "g/1"]}}
    annotations = [each for record in (one, pair, ranked) for each in record["annotations"]]
    assert not any("completed_by" in each for each in annotations), "a server refuses users that it does not have"
    assert [item["id"] for item in ranked["data"]["items"]] == ["g/0", "g/1", "g/2"]


def record(id: str = "g/0", view: str = "", rows: Sequence[str] = (), **said: Any) -> dict[str, Any]:
    """A record of Argilla with an answer of one user for each question."""
    responses = {question: [{"value": value, "user_id": "u"}] for question, value in said.items()}
    metadata = {"view": view, "rows": rows} if view else {}
    return {"id": id, "fields": {}, "metadata": metadata, "responses": responses}


def test_records_that_were_made_elsewhere_are_of_the_answer_that_their_id_names(tmp_path: Path) -> None:
    path = tmp_path / "made.jsonl"
    ranked = [{"value": "response_b", "rank": 1}, {"value": "response_a", "rank": 2}]
    records = [record("g/1", score=2), record("pair:g", "pair", ["g/0", "g/1"], ranking=ranked)]
    path.write_text("\n".join(map(json.dumps, records)))
    one, pair = read_feedback(path, "argilla", ANSWERS, SETTINGS)
    assert (one.person, one.item, one.rows, one.score) == ("u", "one:g/1", ("g/1",), 2)
    assert pair.ranking == ("g/1", "g/0")


@pytest.mark.parametrize(
    ("broken", "problem"),
    [
        ("{bad", "not JSON"),
        ({"id": "g/0"}, "KeyError 'responses'"),
        ({"id": "g/0", "responses": [1]}, "not a record of argilla"),
        (record("x/9", score=2), "no answer 'x/9'"),
        (record(score=9), "score: must be 1 to 5"),
        (record(score="good"), "score: .* valid integer"),
        (record(thumb="sideways"), "thumb: .*'up' or 'down'"),
        (record(comment=["x"]), "comment: .* valid string"),
        (record("x:g", "single", ["g/0"], score=5), "view: .*'one', 'pair' or 'group'"),
        (record("x:g", "group", ["g/0"], ranking=["response"]), "rows: must be 2 to 9 for the view 'group'"),
        (record("x:g", "pair", ["g/0", "g/1"], score=5), "score: is only for a single answer"),
        (record("x:g", "one", ["g/0"], ranking=["response"]), "ranking: is only for several answers"),
    ],
)
def test_broken_records_are_named_by_line_and_nothing_is_imported(broken: Any, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    lines = [json.dumps(record(score=2)), broken if isinstance(broken, str) else json.dumps(broken)]
    path.write_text("\n".join(lines))
    with pytest.raises(DataError, match="line 2: .*" + problem, check=about("file", str(path))):
        read_feedback(path, "argilla", ANSWERS, SETTINGS)


def test_unknown_formats_and_missing_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, check=about("format", "csv")):
        write_feedback(known(), ANSWERS, tmp_path / "x", "csv")
    assert not (tmp_path / "x").exists() and "pairs" in FORMATS
    with pytest.raises(DataError, check=about("format", "pairs")):
        read_feedback(tmp_path / "x", "pairs", ANSWERS, SETTINGS)
    with pytest.raises(DataError, match="no such file"):
        read_feedback(tmp_path / "x", "argilla", ANSWERS, SETTINGS)


def test_judgements_of_answers_that_left_the_log_are_counted(tmp_path: Path) -> None:
    gone = Judgement("9", "Ann", "one:old/0", "one", ("old/0",), score=1)
    done = write_feedback(known([*SAID, gone]), ANSWERS, tmp_path / "x.jsonl", "scores")
    assert done == (3, 1)


def test_of_what_was_skipped_elsewhere_nothing_else_counts_and_nothing_said_is_no_judgement(tmp_path: Path) -> None:
    [record, *_] = json.loads((SAMPLES / "label_studio.json").read_text())
    first = record["annotations"][0]
    record["annotations"] = [{**first, "was_cancelled": True}, {**first, "result": []}]
    (tmp_path / "skipped.json").write_text(json.dumps([record]))
    [given] = read_feedback(tmp_path / "skipped.json", "label_studio", ANSWERS, SETTINGS)
    assert given.skipped and (given.score, given.labels, given.comment) == (None, (), "")
