"""Experiences: filtered and sorted, by group, and one with its tokens."""

from __future__ import annotations

import contextlib
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from fastapi.responses import Response
from pydantic import BeforeValidator, Field, create_model

from rayrft.data.selection import invalid_condition
from rayrft.experience import Experience, from_batch, rewards_by_token
from rayrft.markup import image_content
from rayrft.runtime.serving.http import ApiError
from rayrft.viewer.folders import RunFolder, Runs
from rayrft.viewer.index import CHOICES
from rayrft.viewer.views import UPDATE_S, Query, RunRequest, Whole, dicts

_TOKENS = 20_000
"""Most tokens of a row that are shown."""
_LISTED = """experience_id, group_id, task_id, source, status, stop_reason, reward, advantage, tokens, prompt_tokens,
    logprob, version, staleness, group_status, step, uses, drop_reason, turns, images, question, answer, error"""
_RANGES = ("reward", "tokens", "staleness", "version", "step")
_SORTS = (*_RANGES, "finished_at", "logprob", "group_deviation", "source", "status", "task_id")
_TEXTS = (*CHOICES, "task_id", "group_id")

_Number = Annotated[float | None, BeforeValidator(lambda value: None if value == "" else value)]


_PARAMETERS: dict[str, Any] = {
    **{f"{end}_{name}": (_Number, None) for name in _RANGES for end in ("min", "max")},
    **{name: (str, "") for name in _TEXTS},
    "text": (str, Field("", max_length=400)),
    "where": (str, Field("", max_length=2000)),
    "sort": (str, Field("-finished_at", pattern=f"^-?({'|'.join(_SORTS)})$")),
    "offset": (Whole, 0),
    "limit": (int, Field(50, ge=1, le=200)),
}
RowsRequest = create_model("RowsRequest", __base__=RunRequest, **_PARAMETERS)
"""Parameters of ``rows``: ranges with both ends, values, a text in question or answer, and a condition in SQL."""


class RowRequest(RunRequest):
    """Parameters of ``row``: an experience id."""

    id: str


class ImageRequest(RowRequest):
    """Parameters of ``image``: the number of an image of a row, from 0."""

    number: int = Field(ge=0)


def _rows(runs: Runs, asked: Any) -> dict[str, Any]:
    import duckdb

    index = runs.get(asked.run).rows
    index.update(UPDATE_S)
    log, conditions, values = index.about(), ["true"], list[Any]()  # so that it lags if these rows may
    for name in _RANGES:
        for end, sign in (("min", ">="), ("max", "<=")):
            if (bound := getattr(asked, f"{end}_{name}")) is not None:
                conditions.append(f"{name} {sign} ?")
                values.append(bound)
    for name in _TEXTS:
        if value := getattr(asked, name):
            conditions.append(f"{name} = ?")
            values.append(value)
    if asked.text:
        conditions.append("(contains(lower(answer), lower(?)) or contains(lower(question), lower(?)))")
        values += [asked.text] * 2
    if not (asked.group_status or asked.task_id or asked.group_id or "evaluation" in asked.where):
        conditions.append("group_status <> 'evaluation'")
    order = f"{asked.sort.lstrip('-')} {'desc' if asked.sort.startswith('-') else 'asc'} nulls last, experience_id"
    try:
        with index.cursor() as connection:
            found = "answers"
            if asked.where:  # an expression alone: neither a second statement nor a file
                chosen = connection.table(found).filter(duckdb.SQLExpression(asked.where))
                chosen.create_view(found := "chosen_rows")
            met = f"from {found} where {' and '.join(conditions)}"
            counts = f"select count(*), avg(reward), count(distinct place), avg(tokens), avg(staleness) {met}"
            count, reward, groups, tokens, staleness = connection.execute(counts, values).fetchall()[0]
            page = f"select {_LISTED} {met} order by {order} limit {asked.limit} offset {asked.offset}"
            listed = dicts(connection.execute(page, values))
    except duckdb.Error as error:  # of the condition, if there is one: at any row, or by its time
        if not asked.where:
            raise
        raise invalid_condition(asked.where, str(error)) from None
    means = {"reward": reward, "groups": groups, "tokens": tokens, "staleness": staleness}
    return {"count": count, "means": means, "rows": listed, "log": log}


def _row(runs: Runs, asked: RowRequest) -> dict[str, Any]:
    run = runs.get(asked.run)
    run.rows.update(UPDATE_S)
    row, group = _found(run, asked.id)
    [shown] = [each for each in group if each.experience_id == asked.id]
    tokens = shown.token_ids[:_TOKENS].tolist()
    texts = _decoder(run.path, str((run.config.get("model") or {}).get("path") or ""))
    with run.rows.cursor() as connection:
        sql = f"select {_LISTED} from answers where group_id = ? order by row, experience_id"
        facts = {each["experience_id"]: each for each in dicts(connection.execute(sql, [row["group_id"]]))}
    return {
        **facts[asked.id],
        "turns": list(shown.turns),
        "components": shown.reward_components,
        "metrics": shown.metrics,
        "labels": shown.labels,
        "late_feedback": run.rows.late_feedback(asked.id),
        "greedy_reward": shown.greedy_reward,
        "error": shown.error,
        "times": [shown.created_at, shown.finished_at],
        "image_count": len(shown.images),
        "group": [
            {**facts[each.experience_id], "text": _answer(each)} for each in group if each.experience_id in facts
        ],
        "token_texts": [texts(token) for token in tokens] if texts else None,
        "token_ids": tokens,
        "token_count": len(shown.token_ids),
        "mask": shown.action_mask[:_TOKENS].tolist(),
        "logprobs": shown.logprobs[:_TOKENS].tolist(),
        "teacher_logprobs": shown.teacher_logprobs[:_TOKENS].tolist() if shown.teacher_logprobs is not None else None,
        "trainer_gaps": dict(run.records().gaps.get(asked.id, {}).get("tokens", [])),
        "versions": [[span.start, span.end, span.version] for span in shown.weight_versions],
        "token_rewards": rewards_by_token(shown.metrics),
        "log": run.rows.about(),
    }


def _image(runs: Runs, asked: ImageRequest) -> Response:
    _, group = _found(runs.get(asked.run), asked.id)
    images = [path for each in group if each.experience_id == asked.id for path in each.images]
    found = image_content(images[asked.number]) if asked.number < len(images) else None
    if found is None:
        raise ApiError(404, "There is no such image.", code="image_not_found", param="number")
    return Response(found[0], media_type=found[1], headers={"X-Content-Type-Options": "nosniff"})


def _found(run: RunFolder, experience_id: str) -> tuple[dict[str, Any], list[Experience]]:
    """Return where a row is, and the rows of its group. Raises ApiError 404 for an unknown id."""
    names = ["file", "row", "group_id", "group_rows", "first"]
    with run.rows.cursor() as connection:
        sql = "select r.file, r.row, group_id, group_rows, first, place < 0 from rows r left join places using (place)"
        found = connection.execute(f"{sql} where experience_id = ? order by place", [experience_id]).fetchall()
    if not found:
        lags = run.rows.about()["lags"]
        why = "it is still being read" if lags else "rows leave it when it reaches buffer.log_bytes"
        raise ApiError(404, f"There is no row {experience_id!r} in the log: {why}.", code="row_not_found", param="id")
    *values, is_expert = found[-1]
    row = dict(zip(names, values, strict=True))
    if row["first"] is None:
        return row, run.rows.read_answers(row["file"], row["group_id"])
    span = (row["row"], 1) if is_expert else (row["first"], row["group_rows"])
    return row, from_batch(run.rows.read_group(row["file"], *span))


def _answer(row: Experience) -> str:
    """Return the turns of the model in a row, as one text."""
    return "\n\n".join(turn.get("content") or "" for turn in row.turns if turn.get("role") == "assistant")


@lru_cache(maxsize=8)
def _decoder(folder: Path, model: str) -> Any:
    """Return a function from a token id to its text; None if the model's tokenizer is not on this machine."""
    from tokenizers import Tokenizer

    files = [folder / "model" / "tokenizer.json", Path(model or ".") / "tokenizer.json"]
    if not any(file.is_file() for file in files):
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        with contextlib.suppress(HFValidationError):  # it is a path
            files.append(Path(str(try_to_load_from_cache(model, "tokenizer.json"))))
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        return None
    tokenizer = Tokenizer.from_file(str(file))
    return lru_cache(maxsize=1 << 16)(lambda token: tokenizer.decode([token], skip_special_tokens=False))


QUERIES: dict[str, Query] = {"rows": (RowsRequest, _rows), "row": (RowRequest, _row), "image": (ImageRequest, _image)}
