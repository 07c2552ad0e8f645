"""The page over HTTP: what is asked, what is told to the run, and what is refused."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from rayrft.errors import ActorDied, DataError, RunNotFound, StorageError
from rayrft.feedback.app import FeedbackPage
from rayrft.feedback.items import ShownGroup
from rayrft.feedback.journal import FILE, read_journal
from tests.feedback.scripted import KEY, ScriptedRows, group, page


class Client:
    """Someone at a page, and the run behind it."""

    def __init__(self, folder: Path, served: FeedbackPage) -> None:
        self.folder, self.page, self.rows = folder, served, cast(ScriptedRows, served.rows)
        transport = httpx.ASGITransport(served.app())
        self.http = httpx.AsyncClient(
            transport=transport, base_url="http://page", headers={"Authorization": f"Bearer {KEY}"}
        )
        self._number = 0

    async def post(self, path: str, status: int = 200, **body: Any) -> dict[str, Any]:
        response = await self.http.post(f"/v1/{path}", json={"person": "Ann", **body})
        assert response.status_code == status, response.text
        return response.json()

    async def judge(self, shown: dict[str, Any] | str, status: int = 200, **what: Any) -> dict[str, Any]:
        """Judge an item, given as it came, or a single answer by its id."""
        if isinstance(shown, str):
            shown = {"key": f"one:{shown}", "answers": [{"id": shown}]}
        self._number += 1
        rows = [answer["id"] for answer in shown["answers"]]
        return await self.post(
            "judge", status, **{"id": f"judgement-{self._number}", "item": shown["key"], "rows": rows, **what}
        )

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():  # noqa: ASYNC110 - what is waited for is written by a thread
                await asyncio.sleep(0.01)

    def told(self) -> list[dict[str, Any]]:
        return self.rows.told()


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "running").touch()
    yield tmp_path


@asynccontextmanager
async def opened(folder: Path, *groups: ShownGroup, **settings: Any) -> AsyncIterator[Client]:
    served = page(folder, list(groups) or [group("g", "a", "b", "c")], **settings)
    client = Client(folder, served)
    try:
        yield client
    finally:
        await client.http.aclose()
        await served.close()


@pytest.fixture
async def client(running: Path) -> AsyncIterator[Client]:
    async with opened(running) as client:
        yield client


async def test_a_judgement_reaches_the_run_and_the_journal_and_counts(client: Client) -> None:
    taken = await client.post("next", view="one")
    assert taken["left"] == {"one": 3, "pair": 1, "group": 1} and taken["mine"]["judged"] == 0
    item = taken["item"]
    assert item["reference"] == "reference of g" and item["answers"][0]["reward"] == 0.5
    said = await client.judge(item, score=4, labels=["polite"], comment="fine", seconds=2.5)
    assert (said["outcome"], said["others"], said["left"]["one"]) == ("applied", [], 2)
    counts = {"judged": 1, "skipped": 0, "today": 1, "edited": 0}
    assert said["mine"] == {**counts, "seconds": 2.5, "latest": "judgement-1"}
    row = item["answers"][0]["id"]
    labels = {"score": "4", "labels": "polite", "comment": "fine", "people": "Ann"}
    assert client.told() == [{"row": row, "reward": 0.75, "labels": labels}]
    assert [entry.kind for entry in read_journal(client.folder / FILE)] == ["judged", "sent"]
    assert (await client.post("next", view="one"))["item"]["key"] != item["key"]


async def test_each_kind_of_judgement_is_told_as_what_it_is(running: Path) -> None:
    async with opened(running, group("g", "a", "b", "c"), group("h", "x", "y")) as client:
        pair = (await client.post("next", view="pair"))["item"]
        ids = [answer["id"] for answer in pair["answers"]]
        await client.judge(pair, ranking=[ids[1], ids[0]])
        rank = (await client.post("next", view="group"))["item"]
        order = sorted(answer["id"] for answer in rank["answers"])
        await client.judge(rank, ranking=order)
        tie = (await client.post("next", view="pair"))["item"]
        await client.judge(tie, tie=True)
        await client.judge("g/0", thumb="down")
        edited = await client.judge("h/1", edit="Better.")
        assert edited["outcome"] == "applied" and edited["mine"]["edited"] == 1
        told = client.told()
        picked = sorted((each["labels"]["place"], each["row"], each["reward"]) for each in told[:2])
        assert picked == [("1", ids[1], None), ("2", ids[0], None)]
        ranked = {each["row"]: each["reward"] for each in told[2:5]}
        assert ranked == {"g/0": 1.0, "g/1": 0.5, "g/2": 0.0}
        assert {"edit": "Better.", "id": "judgement-5"} in told
        assert [each["reward"] for each in told if each.get("row") == "g/0"][-1] == 0.5, "the mean of rank and thumb"


async def test_what_comes_twice_is_one_judgement_and_anothers_id_is_refused(client: Client) -> None:
    many = await asyncio.gather(*(client.judge("g/0", id="the-same-one", score=2) for _ in range(5)))
    assert {each["outcome"] for each in many} == {"applied"} and many[-1]["mine"]["judged"] == 1
    assert len(client.told()) == 1
    before = (client.folder / FILE).read_bytes()
    await client.judge("g/0", id="the-same-one", score=2)
    assert (client.folder / FILE).read_bytes() == before
    refused = await client.judge("g/0", 409, id="the-same-one", score=5, person="Bob")
    assert refused["error"]["code"] == "id_taken"
    await client.judge("g/0", score=5)
    assert [each["reward"] for each in client.told()] == [0.25, 1.0], "a later one of the same person replaces it"


async def test_the_second_of_two_people_is_told_and_both_count(running: Path) -> None:
    async with opened(running, group("g", "a")) as client:
        item = (await client.post("next", view="one"))["item"]
        assert (await client.post("next", view="one", person="Bob"))["item"] is None
        first, second = await asyncio.gather(
            client.judge(item, score=1, person="Bob"), client.judge(item, score=5, person="Ann")
        )
        assert first["others"] == ["Ann"] and second["others"] == ["Bob"]
        assert client.told()[-1]["reward"] == 0.5
        stats = (await client.http.get("/v1/stats")).json()
        assert stats["people"] == {"Bob": 1, "Ann": 1}
        assert stats["agreement"] == [{"question": "score", "value": 0.0, "items": 1, "people": 2}]


async def test_what_is_too_late_or_refused_is_kept_and_said(running: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(running, group("late", "a", stop_reason="late"), group("g", "b")) as client:
        said = await client.judge("late/0", score=4)
        assert said["outcome"] == "late" and "after version 3" in said["reason"]

        def refuse(self: object, judgement: object) -> None:
            raise DataError("row 0 is invalid: longer than max_length", field="demonstrations.human")

        monkeypatch.setattr(ScriptedRows, "demonstrate", refuse)
        said = await client.judge("g/0", edit="x " * 1000)
        assert said["outcome"] == "refused" and "max_length" in said["reason"]
        stats = (await client.http.get("/v1/stats")).json()
        assert stats["rows"]["late"] == 1 and stats["edits"] == {"refused": 1} and stats["rows"]["kept"] == 0
    kinds = [entry.kind for entry in read_journal(running / FILE)]
    assert (kinds[:3], sorted(kinds[3:])) == (["judged", "sent", "judged"], ["edit_sent", "sent"])


async def test_what_is_said_while_a_run_is_away_is_told_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayrft.feedback.delivery._AGAIN_S", 0.01)
    async with opened(tmp_path) as client:
        said = await client.judge("g/0", score=5, edit="Better.")
        assert said["outcome"] == "kept" and not said["running"] and client.told() == []
        (tmp_path / "running").touch()
        await client.until(lambda: len(client.told()) == 2)
        assert {each.get("edit", each.get("reward")) for each in client.told()} == {1.0, "Better."}


async def test_what_is_said_as_a_run_returns_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looking, go_on, look = threading.Event(), threading.Event(), ScriptedRows.running

    def slow(self: ScriptedRows) -> bool:
        found = look(self)
        if threading.current_thread() is not threading.main_thread():
            looking.set()
            assert go_on.wait(60)
        return found

    monkeypatch.setattr(ScriptedRows, "running", slow)
    async with opened(tmp_path) as client:
        first = asyncio.create_task(client.judge("g/0", score=5))
        assert await asyncio.to_thread(looking.wait, 60)
        (tmp_path / "running").touch()
        second = asyncio.create_task(client.judge("g/1", score=1))
        await client.until(lambda: "judgement-2" in client.page.judgements.all)
        go_on.set()
        await first
        assert (await second)["outcome"] == "applied"


async def test_a_buffer_that_dies_as_it_is_told_is_told_again(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayrft.feedback.delivery._AGAIN_S", 0.01)
    deaths = [ActorDied("died", field="buffer"), RunNotFound("ended", field="run")]

    def dying(row: str) -> None:
        if deaths:
            raise deaths.pop()

    client.rows.on_feedback = dying
    assert (await client.judge("g/0", score=5))["outcome"] == "kept"
    await client.until(lambda: bool(client.told()))
    assert not deaths and [each["reward"] for each in client.told()] == [1.0]
    assert (await client.judge("g/1", score=1))["outcome"] == "applied"


async def test_who_was_too_late_is_told_later_if_not_at_once(running: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayrft.feedback.app._SETTLE_S", 0.01)
    slow = threading.Event()
    async with opened(running, group("late", "a", "b", stop_reason="late")) as client:
        client.rows.on_feedback = lambda row: slow.wait(60)
        said = [await client.judge(f"late/{at}", score=4) for at in range(2)]
        assert [each["outcome"] for each in said] == ["kept", "kept"] and said[1]["news"] == []
        slow.set()
        news: list[dict[str, Any]] = []
        async with asyncio.timeout(20):
            while len(news) < 2:
                await asyncio.sleep(0.01)  # requests to the page alone let nothing else run
                assert (await client.post("me", person="Bob"))["news"] == []
                news += (await client.post("me"))["news"]
        assert {(each["id"], each["outcome"]) for each in news} == {("judgement-1", "late"), ("judgement-2", "late")}
        assert (await client.post("me"))["news"] == []


async def test_what_many_say_while_the_run_is_away_is_all_told_once(running: Path) -> None:
    (running / "running").unlink()
    async with opened(running, *(group(f"g{number}", "a") for number in range(50))) as client:
        await asyncio.gather(*(client.judge(f"g{number}/0", score=3) for number in range(50)))
        (running / "running").touch()
        await client.judge("g0/0", score=3, edit="x")
        rows = sorted(each["row"] for each in client.told() if "row" in each)
        assert rows == sorted(f"g{number}/0" for number in range(50))


async def test_a_server_that_was_killed_goes_on_where_it_was(running: Path) -> None:
    async with opened(running) as client:
        await client.judge("g/0", score=5)
        (running / "running").unlink()
        await client.judge("g/1", score=1)
    (running / "running").touch()
    async with opened(running) as client:
        again = await client.post("judge", id="judgement-1", item="one:g/0", rows=["g/0"], score=5)
        assert again["mine"]["judged"] == 2 and again["left"]["one"] == 1
        said = await client.judge("g/2", id="another-one", score=3)
        assert said["outcome"] == "applied"
        assert [(each["row"], each["reward"]) for each in client.told()] == [("g/0", 1.0), ("g/1", 0.0), ("g/2", 0.5)]


async def test_an_item_that_left_the_queue_can_still_be_judged(running: Path) -> None:
    async with opened(running, group("g", "a", "b")) as client:
        await client.post("me")
        client.page.queue.items.clear()
        assert (await client.judge("g/1", score=5))["outcome"] == "applied"
        pair = {"key": "pair:g", "answers": [{"id": "g/0"}, {"id": "g/1"}]}
        assert (await client.judge(pair, ranking=["g/1", "g/0"]))["outcome"] == "applied"
        for key, rows in [("one:g/0", ["g/1"]), ("pair:h", ["g/0", "g/1"]), ("one:x", ["x"]), ("odd:g", ["g/0"])]:
            refused = await client.judge({"key": key, "answers": [{"id": row} for row in rows]}, 404, score=1)
            assert refused["error"]["code"] == "item_not_found"


async def test_undo_gives_the_item_back_with_what_was_said_and_the_row_its_reward(client: Client) -> None:
    item = (await client.post("next", view="one"))["item"]
    await client.judge(item, score=1, comment="no")
    back = await client.post("undo")
    assert back["item"] == item and (back["draft"]["score"], back["draft"]["comment"]) == (1, "no")
    assert back["mine"]["judged"] == 0 and back["left"]["one"] == 3
    empty = {"score": "", "comment": "", "people": ""}
    assert client.told()[-1] == {"row": item["answers"][0]["id"], "reward": 0.5, "labels": empty}
    again = await client.post("undo", id=back["id"])
    assert (again["item"], again["draft"]) == (item, back["draft"]), "the first answer may have been lost"
    assert [entry.kind for entry in read_journal(client.folder / FILE)].count("undone") == 1
    await client.post("undo", 404, id=back["id"], person="Bob")
    assert (await client.judge(item, id=back["id"], score=1))["outcome"] == "undone", "a late repeat stays undone"
    await client.post("undo", 404)
    edited = await client.judge("g/2", edit="x")
    assert (await client.post("undo"))["outcome"] == "applied" and edited["outcome"] == "applied"
    assert {"withdrawn": f"human/{edited['id']}"} in client.told()
    assert (await client.http.get("/v1/stats")).json()["edits"] == {"taken back": 1}
    await client.post("undo", 404, id="unknown-id", person="Bob")


async def test_what_left_the_queue_comes_back_when_undone_and_skips_count_alone(running: Path) -> None:
    async with opened(running, group("g", "a", "b")) as client:
        item = (await client.post("next", view="one"))["item"]
        await client.judge(item, skipped=True, score=5, edit="Better.", labels=["polite"])
        assert client.told() == []
        client.page.queue.items.clear()
        back = await client.post("undo")
        assert back["item"]["key"] == item["key"] and (back["draft"]["score"], back["draft"]["edit"]) == (None, None)
        await client.judge(item, score=2)
        again = await client.post("undo", id=back["id"])
        assert again["item"] is None and again["mine"]["judged"] == 1, "what was said since stays"


async def test_a_row_on_which_the_run_fails_harms_no_other(client: Client) -> None:
    def failing(row: str) -> None:
        if row == "g/0":
            raise ValueError("of the Buffer")

    client.rows.on_feedback = failing
    failed = await client.judge("g/0", score=1)
    assert (failed["outcome"], failed["reason"]) == ("refused", "ValueError: of the Buffer")
    assert (await client.judge("g/1", score=1))["outcome"] == "applied"


async def test_a_journal_that_cannot_be_written_takes_nothing(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    await client.post("me")

    def full(self: object, *lines: bytes, durable: bool) -> None:
        raise StorageError("cannot be written: No space left on device", field="journal")

    with monkeypatch.context() as patch:
        patch.setattr("rayrft.json_lines.JsonLines.append", full)
        await client.judge("g/0", 500, id="the-same-one", score=5)
    assert client.told() == [] and (await client.post("me"))["mine"]["judged"] == 0
    assert (await client.judge("g/0", id="the-same-one", score=5))["outcome"] == "applied"


@pytest.mark.parametrize(
    ("what", "status", "param"),
    [
        ({}, 400, "score"),
        ({"score": 0}, 400, "score"),
        ({"score": 6}, 400, "score"),
        ({"score": 2.5}, 400, "score"),
        ({"thumb": "sideways"}, 400, "thumb"),
        ({"labels": ["unknown"]}, 400, "labels"),
        ({"ranking": ["g/0"]}, 400, "ranking"),
        ({"tie": True}, 400, "tie"),
        ({"edit": "  \n"}, 400, "edit"),
        ({"comment": "  "}, 400, "score"),
        ({"seconds": -1, "score": 1}, 400, "seconds"),
        ({"id": "../../etc", "score": 1}, 400, "id"),
        ({"person": "", "score": 1}, 400, "person"),
        ({"person": "a\u0007b", "score": 1}, 400, "person"),
        ({"person": "x" * 65, "score": 1}, 400, "person"),
        ({"reward": 1.0, "score": 1}, 400, "reward"),
        ({"rows": ["g/1"], "score": 1}, 404, "item"),
        ({"rows": ["g/0", "g/0"], "score": 1}, 400, "rows"),
        ({"rows": [], "score": 1}, 400, "rows"),
        ({"item": "one:nobody", "rows": ["nobody"], "score": 1}, 404, "rows"),
        ({"item": "pair:g", "rows": ["g/0", "g/1"], "score": 1}, 400, "score"),
        ({"item": "pair:g", "rows": ["g/0", "g/1", "g/2"], "tie": True}, 404, "item"),
        ({"item": "pair:g", "rows": ["g/0", "g/0"], "tie": True}, 400, "rows"),
        ({"item": "pair:g", "rows": ["g/0", "h/1"], "tie": True}, 404, "item"),
        ({"item": "pair:g", "rows": ["g/0", "g/7"], "tie": True}, 404, "rows"),
        ({"item": "group:g", "rows": ["g/0", "g/1", "g/2"], "ranking": ["g/0", "g/1"]}, 400, "ranking"),
        ({"item": "group:g", "rows": ["g/0", "g/1", "g/2"], "ranking": ["g/0", "g/1", "g/1"]}, 400, "ranking"),
        ({"item": "group:g", "rows": ["g/0", "g/1", "g/2"], "edit": "x"}, 400, "edit"),
    ],
)  # fmt: skip
async def test_what_does_not_fit_is_refused_and_leaves_no_trace(
    client: Client, what: dict[str, Any], status: int, param: str
) -> None:
    refused = await client.judge("g/0", status, **what)
    assert refused["error"]["param"] == param
    assert read_journal(client.folder / FILE) == [] and client.told() == []


async def test_broken_bodies_unknown_views_and_half_characters_are_refused(client: Client) -> None:
    half = b'{"person":"Ann","id":"12345678","item":"one:g/0","rows":["g/0"],"comment":"\\ud800"}'
    unknown = b'{"person": "Ann", "view": "all"}'
    for path, body in [("judge", b"{bad"), ("next", unknown), ("next", b""), ("judge", half)]:
        response = await client.http.post(f"/v1/{path}", content=body)
        assert response.status_code == 400, body
    declared = await client.http.post("/v1/judge", content=b"{}", headers={"Content-Length": str(100 << 20)})
    assert declared.status_code == 413 and read_journal(client.folder / FILE) == []


async def test_a_wrong_key_opens_nothing_and_the_files_say_nothing_of_the_run(client: Client) -> None:
    for header in ("", "Bearer sk-wrong", f"Basic {KEY}"):
        for path in ("next", "judge", "undo", "keep", "leave", "me"):
            response = await client.http.post(f"/v1/{path}", json={}, headers={"Authorization": header})
            assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
        assert (await client.http.get("/v1/stats", headers={"Authorization": header})).status_code == 401
    shown = await client.http.get("/", headers={"Authorization": ""})
    policy = shown.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "demo" not in shown.text
    for file in ("page.js", "store.js", "page.css"):
        found = await client.http.get(f"/{file}", headers={"Authorization": ""})
        assert found.status_code == 200 and found.headers["x-content-type-options"] == "nosniff"
        assert f'"{file}"' in shown.text or file == "store.js"
    assert "innerHTML" not in (await client.http.get("/page.js")).text
    assert (await client.http.get("/health", headers={"Authorization": ""})).status_code == 200


async def test_who_leaves_frees_the_item_and_who_keeps_it_has_it(running: Path) -> None:
    async with opened(running, group("g", "a")) as client:
        await client.post("next", view="one")
        assert (await client.post("keep", item="one:g/0"))["kept"]
        assert not (await client.post("keep", item="one:g/0", person="Bob"))["kept"]
        await client.post("leave")
        assert (await client.post("next", view="one", person="Bob"))["item"]["key"] == "one:g/0"


async def test_new_rows_of_a_run_join_the_queue(running: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayrft.feedback.app._EMPTY_S", 0.0)
    async with opened(running, group("g", "a")) as client:
        await client.judge((await client.post("next", view="one"))["item"], score=1)
        client.rows.found.append(group("new", "b"))
        assert (await client.post("next", view="one"))["item"]["key"] == "one:new/0"


async def test_a_log_that_cannot_be_read_yet_is_read_later(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:

    def unreadable(self: object) -> None:
        raise StorageError("no Buffer has written here", field="log")

    with monkeypatch.context() as patch:
        patch.setattr(ScriptedRows, "groups", unreadable)
        assert "no Buffer" in (await client.post("me", 500))["error"]["message"]
    assert (await client.post("me"))["left"]["one"] == 3


async def test_without_reference_answers_the_page_says_why(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable(self: object) -> None:
        raise DataError("no such data set", field="tasks.sources.0")

    monkeypatch.setattr(ScriptedRows, "references", unreadable)
    assert (await client.post("me"))["notice"] == "Reference answers cannot be read: no such data set"
    assert (await client.post("next", view="one"))["item"]["reference"] is None


async def test_images_of_an_item_are_given_out_and_no_other_file(running: Path) -> None:
    (running / "a.png").write_bytes(b"a picture")
    (running / "secret.txt").write_bytes(b"no picture")
    urls = ("data:image/png;base64,c2VudA==", "data:text/html;base64,PHNjcmlwdD4=")
    images = (str(running / "a.png"), str(running / "secret.txt"), str(running / "gone.png"), *urls)
    async with opened(running, group("g", "a", images=images)) as client:
        assert (await client.post("next", view="one"))["item"]["images"] == 5
        found = await client.http.get("/v1/image", params={"item": "one:g/0", "number": 0})
        assert (found.content, found.headers["content-type"]) == (b"a picture", "image/png")
        sent = await client.http.get("/v1/image", params={"item": "one:g/0", "number": 3})
        assert (sent.content, sent.headers["content-type"]) == (b"sent", "image/png")
        for item, number in [
            ("one:g/0", 1),
            ("one:g/0", 2),
            ("one:g/0", 4),
            ("one:g/0", 5),
            ("one:g/0", -1),
            ("one:x", 0),
            ("", "x"),
        ]:
            refused = await client.http.get("/v1/image", params={"item": item, "number": number})
            assert refused.status_code == 404, (item, number)
        without = await client.http.get("/v1/image?item=one:g/0&number=0", headers={"Authorization": ""})
        assert without.status_code == 401
