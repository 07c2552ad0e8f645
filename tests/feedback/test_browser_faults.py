"""The page in a real browser when something breaks: a server that is away, an answer that is lost, a wrong key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rayrft.feedback.journal import FILE, read_journal
from rayrft.feedback.judgements import JudgementUndone
from tests.browser import needs_chromium
from tests.feedback.people import Arrive, Serve, said, spoken
from tests.feedback.scripted import KEY

pytestmark = needs_chromium


@pytest.mark.slow  # on a loaded machine the browser sometimes lets a request pass that the test wants to hold
@pytest.mark.parametrize("way", ["hangs", "is gone"])
def test_a_server_that_does_not_answer_is_asked_again(way: str, serve: Serve, arrive: Arrive, tmp_path: Path) -> None:
    person = arrive(serve(*spoken(2)))
    person.page.clock.install()
    person.page.reload()
    person.ready()
    person.page.evaluate(
        """AbortSignal.timeout = (ms) => {  // by the clock of the test
        const ends = new AbortController(); setTimeout(() => ends.abort(), ms); return ends.signal; }"""
    )
    held: list[Any] = []

    def hold(route: Any) -> None:
        if held:
            route.continue_()
        elif way == "is gone":
            route.abort()
        held.append(route)

    person.page.route("**/v1/judge", hold)
    with person.page.expect_request("**/v1/judge"):
        person.key("5", "c")
        person.write("typed before")
        person.key("Control+Enter")
    person.see("#main").to_have_js_property("inert", True)
    person.page.keyboard.type("lost")
    if way == "hangs":
        person.page.clock.run_for(3000)
    person.see("#offline").to_contain_text("The server does not answer")
    with person.page.expect_response("**/v1/judge"):
        person.page.clock.run_for(12_600)
    person.see("#offline").to_be_hidden()
    person.saved(1)
    person.see("#comment").to_have_value("")
    assert [(each.score, each.comment) for each in said(tmp_path)] == [(5, "typed before")]
    person.errors.clear()  # of the requests that were stopped


@pytest.mark.slow  # on a loaded machine the browser sometimes lets a request pass that the test wants to hold
@pytest.mark.parametrize("way", ["the server is away", "the answer is late", "the answer is lost"])
def test_what_is_taken_back_before_the_server_has_answered_is_not_said_and_what_is_typed_then_stays(
    way: str, serve: Serve, arrive: Arrive, tmp_path: Path
) -> None:
    person = arrive(serve(*spoken(3)))
    first = person.shown
    away, held = [True], list[Any]()

    def hold(route: Any) -> None:
        if not away:
            route.continue_()
        elif way == "the answer is late" and not held:
            held.append((route, route.fetch()))
        elif way == "the answer is lost":
            route.fetch()
            route.abort()
        else:
            route.abort()

    person.page.route("**/v1/judge", hold)
    with person.page.expect_request("**/v1/judge"):
        person.key("5", "Enter")
    while way == "the answer is late" and not held:
        person.page.wait_for_timeout(10)
    person.key("z")
    assert person.shown == first
    person.key("c")
    person.write("on second thoughts")
    person.key("Escape")
    with person.page.expect_response("**/v1/undo"):
        away.clear()
        for route, answer in held:
            route.fulfill(response=answer)
    assert person.shown == first
    person.see("#comment").to_have_value("on second thoughts")
    person.see('[data-choice="score:5"]').to_have_attribute("aria-pressed", "true")
    person.see("#person").to_contain_text("· 0")
    person.key("2", "Enter")
    person.saved(1)
    last = said(tmp_path)[-1]
    assert (list(last.rows), last.score, last.comment) == (first, 2, "on second thoughts")
    undone = {entry.id for entry in read_journal(tmp_path / FILE) if isinstance(entry, JudgementUndone)}
    assert undone == {each.id for each in said(tmp_path)[:-1]} and person.shown != first
    person.errors.clear()  # of the requests that were stopped


@pytest.mark.slow  # on a loaded machine the browser sometimes lets a request pass that the test wants to hold
def test_an_undo_that_is_asked_for_twice_takes_one_judgement_back(serve: Serve, arrive: Arrive, tmp_path: Path) -> None:
    person = arrive(serve(*spoken(3)))
    person.ready()
    for count in (1, 2):
        second = person.shown
        person.key("5", "Enter")
        person.saved(count)
    lost: list[Any] = []

    def lose(route: Any) -> None:
        lost.append(route.fetch())
        route.abort()
        person.page.unroute("**/v1/undo")

    person.page.route("**/v1/undo", lose)
    person.key("z")
    person.see("#toast").to_have_text("Undone.")
    person.see("#person").to_contain_text("· 1")
    assert person.shown == second and len(lost) == 1
    assert sum(isinstance(entry, JudgementUndone) for entry in read_journal(tmp_path / FILE)) == 1
    person.errors.clear()  # of the requests that were stopped


def test_a_wrong_key_is_said_and_the_right_one_opens(serve: Serve, arrive: Arrive) -> None:
    person = arrive(serve(*spoken(1)), key="sk-wrong")
    person.see("#login-problem").to_have_text("Incorrect API key provided.")
    assert person.page.locator("#answers .answer").count() == 0
    person.page.fill("#login-key", KEY)
    person.key("Enter")
    person.ready()
    person.errors.clear()  # the browser writes each 401 to its console


def test_what_the_server_does_not_take_is_not_lost(serve: Serve, arrive: Arrive, tmp_path: Path) -> None:
    person = arrive(serve(*spoken(2)))
    [shown] = person.shown
    person.page.route(
        "**/v1/judge", lambda route: route.fulfill(status=404, body=json.dumps({"error": {"message": "It is gone."}}))
    )
    person.key("c")
    person.write("a long thought")
    person.key("Control+Enter")
    person.see("#toast").to_contain_text("Not taken: It is gone.")
    person.key("i")
    person.see("#stats-body").to_contain_text("a long thought")
    person.key("Escape")
    person.see("#stats").to_be_hidden()
    assert said(tmp_path) == [] and person.shown == [shown]
    person.see("#comment").to_have_value("a long thought")
    person.errors.clear()
