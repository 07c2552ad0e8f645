"""Operators are registered, named, checked against their options and columns, and held to what they say."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

import rayrft
from rayrft.errors import ConfigError, DataError, OperatorFailed
from rayrft.experience import Task
from rayrft.pipelines import Context
from rayrft.pipelines.chain import apply_link
from rayrft.pipelines.operator import operators
from rayrft.pipelines.rows import Ids
from rayrft.pipelines.run.groups import group_difference
from rayrft.pipelines.run.host import packed, unpacked
from rayrft.registry import load_plugins
from tests.errors import about
from tests.pipelines.small import OWN, applied, linked, operator, reasons, rows

load_plugins([OWN])

FOX = rows(question=["fox", "a long question"], answer=["fox", "b"])


def test_a_function_of_a_row_cleans_filters_or_prioritises() -> None:
    found, outcome = applied("shout", FOX, mark="?")
    assert [row["question"] for row in found] == ["FOX?", "A LONG QUESTION?"]
    assert (outcome.changed, outcome.taken, outcome.given) == (2, 2, 2)
    changes = [("fox", "FOX?"), ("a long question", "A LONG QUESTION?")]
    assert [(each.before, each.after) for each in outcome.changes] == changes
    assert [row["size"] for row in applied("size", FOX)[0]] == [3, 15]
    assert linked(FOX, operator("size"))[-1].gives.field("size").type == pa.int32()
    found, outcome = applied("brief", FOX)
    assert [row["question"] for row in found] == ["fox"] and reasons(outcome) == ["too long: 15"]
    assert outcome.left_out[0].values["question"] == "a long question"
    assert [row["priority"] for row in applied("vowels", FOX)[0]] == [1, 6]


def test_made_rows_carry_their_parents_and_the_operator_with_its_version() -> None:
    found, outcome = applied("mirror", FOX)
    assert outcome.made == 1 and len(found) == 3
    made = found[-1]
    assert made["question"] == "noitseuq gnol a" and made["answer"] == "b"
    assert made["parents"] == [found[1]["id"]] and made["made_by"] == "mirror/1"
    assert made["id"] not in {row["id"] for row in found[:2]}
    assert found[0]["parents"] is None and found[0]["made_by"] is None
    assert applied("mirror", FOX)[0] == found, "the same rows make the same rows"


def test_no_two_rows_have_one_id() -> None:
    for chain, files in (
        ([operator("numeric_variation"), operator("numeric_variation", seed=1)], [["1", "2"]]),
        ([operator("echo"), operator("echo")], [["1", "2"]]),
        ([operator("mirror")], [["1", "2"], ["1", "2"]]),
        ([operator("mirror")], [["1", "1-2", None], ["1", "1", "1-2"]]),
        ([operator("mirror")], [[1, 2], [1, 2]]),
    ):
        ids, found = Ids(), []
        for number, given in enumerate(files):
            eggs = [33 + 10 * number + row for row in range(len(given))]
            columns = {
                "id": given,
                "question": [f"Ann has {each} eggs." for each in eggs],
                "answer": [f"{each} * 2 = <<{each}*2={2 * each}>>{2 * each} #### {2 * each}" for each in eggs],
            }
            batch = ids.add(pa.RecordBatch.from_pydict(columns))
            for link in linked(batch, *chain):
                batch, _ = apply_link(link, batch, 0)
            found += batch.to_pylist()
        assert len(found) == sum(map(len, files)) * 2 ** len(chain)
        assert len({row["id"] for row in found}) == len(found)
        assert {str(each) for each in files[0] if each is not None} <= {row["id"] for row in found}


def test_a_file_need_not_tell_the_kind_of_its_lineage_and_something_else_is_refused() -> None:
    for parents in (pa.array([None, None], pa.string()), pa.array([["x"], None], pa.large_list(pa.string()))):
        found, _ = applied("mirror", FOX.append_column("parents", parents).append_column("made_by", pa.nulls(2)))
        assert [row["parents"] for row in found] == [*parents.to_pylist(), [found[1]["id"]]]
    with pytest.raises(DataError, check=about("column parents")):
        applied("mirror", FOX.append_column("parents", pa.array(["Ann and Bob", None])))


@pytest.mark.parametrize("name", ["exact_duplicates", "near_duplicates", "top_share", "novelty", "decontaminate"])
def test_operators_on_all_rows_settle_though_there_is_none(name: str) -> None:
    options = {"share": 0.5, "column": "size"} if name == "top_share" else {}
    context = Context([Task.create("test", "a question", "1")])
    batch = FOX.append_column("size", pa.array([1, 2]))
    [link] = linked(batch, operator(name, **options), context=context)
    link.operator.prepare()
    link.operator.settle()


def test_columns_that_polars_writes_are_as_good_as_others(tiny_model: Path) -> None:
    questions, sizes = ["a b", "a  b c", "a b", None, "a b " * 20, "<b>a  b</b>"], [[1], [2], [1], [1], [1] * 30, None]
    columns = {"question": questions, "answer": ["x"] * 6, "sizes": sizes}
    context, batches = Context([Task.create("test", "a  b c", "x")], tokenizer=str(tiny_model)), list[pa.RecordBatch]()
    for text, many in ((pa.string(), pa.list_(pa.int64())), (pa.large_string(), pa.large_list(pa.int64()))):
        schema = pa.schema({"question": text, "answer": text, "sizes": many})
        batches.append(Ids().add(pa.RecordBatch.from_pydict(columns, schema=schema)))
    for name, options in (
        ("near_duplicates", {"columns": ["question", "answer"]}),
        ("exact_duplicates", {}),
        ("normalise", {}),
        ("strip_markup", {}),
        ("outliers", {"column": "question", "by": "answer"}),
        ("length", {"max_tokens": 1}),
        ("length", {"max_tokens": 1, "column": "sizes"}),
        ("outliers", {"column": "sizes", "by": "answer"}),
        ("decontaminate", {}),
        ("novelty", {}),
        ("expression", {"where": "question = 'a b'"}),
        ("echo", {}),
    ):
        usual, large = (applied(name, batch, context=context, **options)[0] for batch in batches)
        assert usual == large, name


def test_no_number_is_no_other_value_than_no_number() -> None:
    for column in (
        pa.array([float("nan"), 1.0, None]),
        pa.array([[0.0, float("nan")], [], None]),
        pa.array([{"x": float("nan")}, {"x": 1.0}, None]),
    ):
        batch = rows(question=["a", "b", "c"]).append_column("number", column)
        assert applied("copies", batch)[1].changed == 0
        other = batch.set_column(2, "number", pa.array([7.0, 1.0, None]))
        assert applied("shout", other)[1].changed == 3
        message = [packed(batch), packed(pa.RecordBatch.from_pylist(batch.to_pylist(), schema=batch.schema))]
        kept, changed, made = group_difference(*map(unpacked, message), "id")
        assert (kept, changed.schema.names, made) == ([0, 1, 2], [], None)


def test_operators_are_named_by_module_too_and_no_two_have_one_name() -> None:
    found, _ = applied("tests.pipelines.small:whisper", rows(question=["FOX"]))
    assert found[0]["question"] == "fox"
    with pytest.raises(ConfigError, check=about("operators.0.name", "tests.pipelines.small:rows")):
        linked(FOX, operator("tests.pipelines.small:rows"))
    with pytest.raises(ConfigError, match="Did you mean 'near_duplicates'", check=about("operators.0.name")):
        linked(FOX, operator("near_duplicate"))
    with pytest.raises(ConfigError, check=about("operator", "shout")):
        rayrft.register_operator("shout", "clean")(lambda question: question)
    rayrft.register_operator("shout", "clean")(operators.get("shout").function)  # as in a notebook cell that is rerun
    with pytest.raises(ConfigError, check=about("needs_kind")):
        rayrft.register_operator("needs_kind")(lambda question: question)
    assert "needs_kind" not in operators


def test_options_are_checked_before_anything_starts() -> None:
    for config, field in (
        (operator("brief", limt=3), "operators.0.limt"),
        (operator("brief", limit="many"), "operators.0.limit"),
        (operator("near_duplicates", threshold=1.5), "operators.0.threshold"),
        (operator("expression"), "operators.0.where"),
        (operator("expression", where="rewrd > 1"), "operators.0.where"),
        (operator("format", pattern="("), "operators.0.pattern"),
        (operator("difficulty_band", min=0.9, max=0.1), "operators.0.min"),
        (operator("length"), "operators.0.tokenizer"),
        (operator("decontaminate"), "operators.0.against"),
        (operator("decontaminate", against=[{"path": "nowhere.jsonl"}]), "operators.0.against.0.path"),
    ):
        with pytest.raises(ConfigError, check=about(field)):
            linked(FOX, config)


def test_a_column_that_is_missing_or_of_another_type_names_the_operator_before_it() -> None:
    with pytest.raises(ConfigError, check=about("operators.0.top_share", "priority")) as raised:
        linked(FOX, operator("top_share", share=0.5))
    assert "test does not give" in raised.value.problem and "id, question, answer" in raised.value.problem
    with pytest.raises(ConfigError, check=about("operators.1.top_share", "priorty")) as raised:
        linked(FOX, operator("vowels"), operator("top_share", share=0.5, column="priorty"))
    assert "vowels (operator 0)" in raised.value.problem and "priority" in raised.value.problem
    linked(FOX, operator("vowels"), operator("top_share", share=0.5))
    with pytest.raises(ConfigError, check=about("operators.0.difficulty", "question")):
        linked(FOX, operator("difficulty", column="question"))
    with pytest.raises(ConfigError, check=about("operators.0.normalise", "question")):
        linked(rows(question=[1], answer=["x"]), operator("normalise"))


def test_what_an_operator_may_not_return_is_an_error() -> None:
    for name in (
        *("loses_rows", "loses_columns", "adds_columns", "changes_types", "few_reasons"),
        *("true_reasons", "no_notes", "makes_rows", "no_parents", "returns_rows"),
    ):
        with pytest.raises(OperatorFailed, check=about(f"operators.0.{name}")):
            applied(name, FOX)

    @rayrft.register_operator("silent", "filter")
    def silent(question: str) -> None: ...

    with pytest.raises(TypeError):
        applied("silent", FOX)
