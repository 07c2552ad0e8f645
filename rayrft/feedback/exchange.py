"""Judgements as files: rows to train on, and records of Argilla and Label Studio, written and read.

Argilla's records are those of ``rg.Record.to_dict``, Label Studio's are annotated tasks of its JSON format. Both are
written one per line; a file with one JSON list, as the two export it, is read as well.
"""

from __future__ import annotations

import hashlib
import json
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rayrft.buffer.reader import Archive
from rayrft.config.serve import FeedbackConfig
from rayrft.data.formats import broken_rows, open_rows
from rayrft.errors import DataError
from rayrft.feedback.items import ShownAnswer
from rayrft.feedback.judgements import Judgement, Judgements, View, check_judgement, judgement_type
from rayrft.feedback.run_rows import read_shown
from rayrft.files import atomic_file

LABEL_TOOLS = ("argilla", "label_studio")
FORMATS = ("pairs", "answers", "labelled", "scores", *LABEL_TOOLS)
_Row = dict[str, Any]
_USERS = uuid.uuid5(uuid.NAMESPACE_URL, "rayrft:feedback")


def write_feedback(judgements: Judgements, answers: dict[str, ShownAnswer], path: Path, form: str) -> tuple[int, int]:
    """Write judgements to a JSONL file. ``answers`` are those in the run's log by experience id. Return the numbers of
    rows that were written, and of judgements whose answers are no longer in the log.

    ``pairs``: ``prompt, chosen, rejected`` of picks and rankings, by majority; ``answers``: edited answers as
    ``messages``; ``labelled``: ``prompt, response, label`` of thumbs; these are demonstrations as in `RowFormat`.
    ``scores``: ``experience_id, reward, labels, messages``, the reward by the settings of ``judgements``. The others
    are records of Argilla and Label Studio. Raises DataError for another format.
    """
    if form not in FORMATS:
        raise DataError("no such format", f"one of {', '.join(FORMATS)}", field="format", value=form)
    there = [each for each in judgements.all.values() if all(row in answers for row in each.rows)]
    rows: dict[str, Iterator[_Row]] = {
        "pairs": _pairs(there, answers),
        "answers": _edits(there, answers),
        "labelled": _labelled(there, answers),
        "scores": _scores(judgements, there, answers),
        "argilla": (_argilla(judged, _fields(judged[0], answers)) for judged in _by_item(there)),
        "label_studio": (_label_studio(judged, _fields(judged[0], answers)) for judged in _by_item(there)),
    }
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows[form]]
    with atomic_file(path) as partial, partial.open("w") as file:
        file.writelines(lines)
    return len(lines), len(judgements.all) - len(there)


def read_feedback(path: Path, tool: str, answers: dict[str, ShownAnswer], settings: FeedbackConfig) -> list[Judgement]:
    """Read the judgements in a file of Argilla or Label Studio.

    The id of a record names an exported item, or an answer by its experience id. Ids of judgements are digests of their
    content, so that importing a file twice counts once. Raises DataError, with line numbers, if records are broken, or
    name no answers of the run.
    """
    if tool not in LABEL_TOOLS:
        raise DataError("no such format to import", f"one of {', '.join(LABEL_TOOLS)}", field="format", value=tool)
    read = {"argilla": _from_argilla, "label_studio": _from_label_studio}[tool]
    found: list[Judgement] = []
    broken: dict[int, str] = {}
    rows = list(open_rows(path, "file").rows())
    for number, row in rows:
        try:
            if isinstance(row, str):
                raise DataError(row)
            for each in read(row):
                if unknown := [name for name in each.rows if name not in answers]:
                    raise DataError(f"the run's log has no answer {unknown[0]!r}")
                found.append(check_judgement(each, settings))
        except DataError as error:
            broken[number] = ": ".join(filter(None, (error.field, error.problem)))
        except ValidationError as error:
            wrong = error.errors()[0]
            broken[number] = f"{'.'.join(map(str, wrong['loc']))}: {wrong['msg']}"
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            broken[number] = f"not a record of {tool}: {type(error).__name__} {error}"
    if broken:
        raise broken_rows(broken, len(rows), "fix or delete them; nothing was imported", field="file", value=str(path))
    return found


def read_answers(archive: Archive, ids: set[str] | None = None) -> dict[str, ShownAnswer]:
    """Return the usual rows of a run's log, or those of these ids, by experience id."""
    shown = (answer for *_, answer in read_shown(archive))
    return {answer.experience_id: answer for answer in shown if ids is None or answer.experience_id in ids}


# Rows to train on.


def _pairs(given: list[Judgement], answers: dict[str, ShownAnswer]) -> Iterator[_Row]:
    votes = Counter(pair for each in given if not each.skipped for pair in each.pairs)
    for (better, worse), count in votes.items():
        against = votes[worse, better]
        if count > against:
            before, chosen = _parted(answers[better])
            other, rejected = _parted(answers[worse])
            ids = {"ids": [better, worse], "votes": [count, against]}
            if before == other:
                yield {"prompt": before, "chosen": chosen, "rejected": rejected, **ids}
            else:
                sides = ([*turns, _said(text)] for turns, text in ((before, chosen), (other, rejected)))
                yield dict(zip(("chosen", "rejected"), sides, strict=True)) | ids


def _edits(given: list[Judgement], answers: dict[str, ShownAnswer]) -> Iterator[_Row]:
    for each in given:
        if each.edit is not None:
            before, _ = _parted(answers[each.rows[0]])
            yield {"messages": [*before, _said(each.edit)], "id": each.id, "of": each.rows[0], "person": each.person}


def _labelled(given: list[Judgement], answers: dict[str, ShownAnswer]) -> Iterator[_Row]:
    thumbs: dict[str, int] = {}
    for each in given:
        if each.thumb is not None:
            thumbs[each.rows[0]] = thumbs.get(each.rows[0], 0) + (1 if each.thumb == "up" else -1)
    for row, balance in thumbs.items():
        if balance:
            before, text = _parted(answers[row])
            yield {"prompt": before, "response": text, "label": balance > 0, "id": row}


def _scores(judgements: Judgements, given: list[Judgement], answers: dict[str, ShownAnswer]) -> Iterator[_Row]:
    for row in dict.fromkeys(row for each in given for row in each.rows):
        wanted = judgements.target(row)
        if wanted.reward is not None:
            messages = [dict(turn) for turn in answers[row].turns]
            yield {"experience_id": row, "reward": wanted.reward, "labels": wanted.labels, "messages": messages}


def _parted(answer: ShownAnswer) -> tuple[list[dict[str, str]], str]:
    """Return the conversation before the last answer, and that."""
    return [dict(turn) for turn in answer.turns[:-1]], answer.text


def _said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


# Records of annotation tools. An item is one record, with the judgements of all.


def _by_item(given: Iterable[Judgement]) -> list[list[Judgement]]:
    found: dict[str, list[Judgement]] = {}
    for each in given:
        found.setdefault(each.item, []).append(each)
    return list(found.values())


def _fields(judged: Judgement, answers: dict[str, ShownAnswer]) -> dict[str, str]:
    """Return the texts of an item's prompt and answers by the names of fields."""
    before, _ = _parted(answers[judged.rows[0]])
    prompt = before[0]["content"] if len(before) == 1 else "\n\n".join(f"{t['role']}: {t['content']}" for t in before)
    return {"prompt": prompt} | {name: answers[row].text for row, name in _names(judged.rows).items()}


def _names(rows: tuple[str, ...]) -> dict[str, str]:
    """Return the names of the fields of an item's answers by the answers' ids, in the order of these."""
    several = len(rows) > 1
    return {row: f"response_{'abcdefghi'[at]}" if several else "response" for at, row in enumerate(sorted(rows))}


def _argilla(judged: list[Judgement], fields: dict[str, str]) -> _Row:
    names = _names(judged[0].rows)
    responses: dict[str, list[_Row]] = {}
    for each in judged:
        values = {
            "score": each.score,
            "thumb": each.thumb,
            "better": "tie" if each.tie else names[each.ranking[0]] if each.view == "pair" and each.ranking else None,
            "ranking": [names[row] for row in each.ranking] if each.view == "group" else None,
            "answer": each.edit,
            "labels": list(each.labels),
            "comment": each.comment,
        }
        for question, value in values.items():
            if value:
                user = str(uuid.uuid5(_USERS, each.person))
                responses.setdefault(question, []).append({"value": value, "user_id": user})
    people = sorted({each.person for each in judged})
    return {
        "id": judged[0].item,
        "fields": fields,
        "metadata": {"view": judged[0].view, "rows": list(names), "people": people},
        "suggestions": {},
        "responses": responses,
        "vectors": {},
        "_server_id": None,
    }


def _from_argilla(record: _Row) -> Iterator[Judgement]:
    metadata = record.get("metadata") or {}
    view, rows = _identified(record["id"], metadata)
    by_name = {name: row for row, name in _names(rows).items()}
    known = {str(uuid.uuid5(_USERS, person)): person for person in metadata.get("people") or []}
    by_person: dict[str, dict[str, Any]] = {}
    for question, given in record["responses"].items():
        for response in given:
            by_person.setdefault(str(response["user_id"]), {})[question] = response["value"]
    for user, values in by_person.items():
        better, ranking = values.get("better"), values.get("ranking") or []
        if better and better != "tie":
            ranking = [better, *(name for name in by_name if name != better)]
        elif ranking and isinstance(ranking[0], dict):  # as Argilla's server has it
            ranking = [each["value"] for each in sorted(ranking, key=lambda each: each["rank"])]
        yield _judgement(
            known.get(user, user),
            record["id"],
            view,
            rows,
            score=values.get("score"),
            thumb=values.get("thumb"),
            ranking=tuple(by_name[name] for name in ranking),
            tie=better == "tie",
            edit=values.get("answer"),
            labels=tuple(values.get("labels") or ()),
            comment=values.get("comment") or "",
        )


def _label_studio(judged: list[Judgement], fields: dict[str, str]) -> _Row:
    names = _names(judged[0].rows)
    items = [{"id": row, "title": name, "body": fields[name]} for row, name in names.items()]
    whole = fields | ({"items": items} if len(names) > 1 else {})
    about = {"item": judged[0].item, "view": judged[0].view, "rows": list(names)}
    return {"data": {**about, **whole}, "annotations": [_annotation(each, names) for each in judged], "predictions": []}


def _annotation(each: Judgement, names: dict[str, str]) -> _Row:
    pick, ranking = (each.ranking, ()) if each.view == "pair" else ((), each.ranking)
    first_row, first = next(iter(names.items()))
    side = ("left" if pick[0] == first_row else "right") if pick else None
    parts: list[tuple[str, str, str, str, Any]] = [
        ("score", "response", "rating", "rating", each.score),
        ("thumb", "response", "choices", "choices", each.thumb and [each.thumb]),
        ("better", "better", "pairwise", "selected", side),
        ("tie", "response_a", "choices", "choices", each.tie and ["tie"]),
        ("ranking", "items", "ranker", "ranker", ranking and {"ranking": list(ranking)}),
        ("answer", "response", "textarea", "text", each.edit and [each.edit]),
        ("labels", first, "choices", "choices", list(each.labels)),
        ("comment", first, "textarea", "text", each.comment and [each.comment]),
    ]
    # An annotation may only name users of the server, so the person is in its parts, which the server returns.
    result = [
        {"id": f"{each.id}-{name}", "person": each.person, "from_name": name, "to_name": to, "type": kind}
        | {"value": {key: value}}
        for name, to, kind, key, value in parts
        if value
    ]
    return {
        "result": result,
        "was_cancelled": each.skipped,
        "ground_truth": False,
        "lead_time": each.seconds,
        "created_at": datetime.fromtimestamp(each.given_at, UTC).isoformat(),
    }


def _from_label_studio(task: _Row) -> Iterator[Judgement]:
    data = task["data"]
    name = data.get("item") or data.get("id") or task["id"]
    view, rows = _identified(name, data)
    for annotation in task["annotations"]:
        if not annotation["result"] and not annotation.get("was_cancelled"):
            continue  # submitted without any judgement
        values = {each["from_name"]: each["value"] for each in annotation["result"]}
        ranking = tuple(values.get("ranking", {}).get("ranker", {}).get("ranking", ()))
        if side := values.get("better", {}).get("selected"):
            ranking = rows if side == "left" else rows[::-1]
        by = annotation.get("completed_by")
        user = by.get("email") or by.get("id") if isinstance(by, dict) else by
        person = next((each["person"] for each in annotation["result"] if "person" in each), user)
        yield _judgement(
            str(person or "label studio"),
            str(name),
            view,
            rows,
            score=values.get("score", {}).get("rating"),
            thumb=next(iter(values.get("thumb", {}).get("choices", ())), None),
            ranking=ranking,
            tie="tie" in values,
            edit=next(iter(values.get("answer", {}).get("text", ())), None),
            labels=tuple(values.get("labels", {}).get("choices", ())),
            comment="\n".join(values.get("comment", {}).get("text", ())),
            skipped=bool(annotation.get("was_cancelled")),
            seconds=float(annotation.get("lead_time") or 0.0),
        )


def _identified(name: Any, about: _Row) -> tuple[View, tuple[str, ...]]:
    """Return the view and the rows of a record: exported ones, or the answer that its id names."""
    if "rows" in about:
        return about["view"], tuple(sorted(about["rows"]))
    return "one", (str(name).removeprefix("one:"),)


def _judgement(person: str, name: str, view: View, rows: tuple[str, ...], **said: Any) -> Judgement:
    """Build a judgement. Raises ValidationError for values of wrong types."""
    digest = hashlib.blake2b(json.dumps([person, rows, view, said], default=list).encode(), digest_size=12).hexdigest()
    item = name if ":" in name else f"one:{name}"
    about = {"id": f"import-{digest}", "person": person, "item": item, "view": view, "rows": rows}
    return judgement_type.validate_python({**about, "given_at": time.time(), **said})
