"""The page in a real browser: every action by mouse and by keyboard."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from tests.browser import expect, needs_chromium
from tests.feedback.people import Arrive, Serve, said, spoken
from tests.feedback.scripted import KEY, ScriptedRows, group

pytestmark = needs_chromium


ACTIONS = {
    "score": ('[data-choice="score:4"]', "4"),
    "thumb": ('[data-choice="thumb:down"]', "-"),
    "label": ('[data-label="wrong"]', "Shift+Digit2"),
    "comment": ("#comment", "c"),
    "edit": ("#edit", "e"),
    "save": ("#save", "Enter"),
    "skip": ("#skip", "s"),
    "undo": ("#undo", "z"),
    "reference": ("#reference-open", "r"),
    "verdict": ("#verdict-open", "v"),
    "left": ('[data-choice="pick:0"]', "ArrowLeft"),
    "right": ('[data-choice="pick:1"]', "ArrowRight"),
    "tie": ('[data-choice="tie:true"]', "0"),
    "second": ('[data-choice="rank:1"]', "2"),
    "third": ('[data-choice="rank:2"]', "3"),
    "clear": ('[data-choice="clear:true"]', "Backspace"),
    "pairs": ('[data-view="pair"]', "]"),
    "groups": ('[data-view="group"]', "]"),
    "statistics": ("#person", "i"),
    "help": ("#help-open", "?"),
    "close help": ("#help button", "Escape"),
    "close statistics": ("#stats button.primary", "Escape"),
}
"""What is clicked, and the key."""


@pytest.mark.parametrize("by", ["mouse", "keyboard"])
def test_every_action_by_mouse_and_by_keyboard(by: str, serve: Serve, arrive: Arrive, tmp_path: Path) -> None:
    person = arrive(serve(*spoken(4)))

    def do(action: str) -> None:
        person.click(ACTIONS[action][0]) if by == "mouse" else person.key(ACTIONS[action][1])

    def write(text: str) -> None:
        """Type into the text that has the focus, and leave it."""
        person.write(text)
        person.key("Escape")

    # One answer.
    [first] = person.shown
    person.see("#save").to_be_disabled()
    for panel in ("reference", "verdict"):
        person.see(f"#{panel}").to_be_hidden()
        do(panel)
    person.see("#reference").to_contain_text(f"reference of {first.partition('/')[0]}")
    person.see("#verdict").to_contain_text("reward0.5format1")
    do("reference")
    person.see("#reference").to_be_hidden()
    do("score")
    do("label")
    do("comment")
    write("Why?")
    do("save")
    person.saved(1)
    assert (said(tmp_path)[-1].rows, said(tmp_path)[-1].score) == ((first,), 4)
    assert (said(tmp_path)[-1].labels, said(tmp_path)[-1].comment) == (("wrong",), "Why?")
    person.see("#toast").to_have_text("Saved.")

    # It is taken back with what was said, changed, and saved again.
    do("undo")
    person.saved(0)
    assert person.shown == [first]
    person.see("#comment").to_have_value("Why?")
    person.see('[data-choice="score:4"]').to_have_attribute("aria-pressed", "true")
    do("score")
    do("thumb")
    do("save")
    person.saved(1)
    assert (said(tmp_path)[-1].score, said(tmp_path)[-1].thumb) == (None, "down")

    # Skipped, then edited.
    [skipped] = person.shown
    do("skip")
    person.see(f'[data-id="{skipped}"]').to_have_count(0)
    person.ready()
    assert said(tmp_path)[-1].skipped and person.shown != [skipped]
    [edited] = person.shown
    do("edit")
    person.see("#save").to_be_disabled()
    person.key("Control+a")
    write("As it should be.")
    do("save")
    person.saved(2)
    assert (said(tmp_path)[-1].rows, said(tmp_path)[-1].edit) == ((edited,), "As it should be.")

    # Two answers.
    do("pairs")
    person.see("main.pair[aria-busy=false]").to_be_visible()
    left, right = person.shown
    do("right")
    do("left")
    person.see(".answer.chosen .place").to_have_text("better")
    do("save")
    person.saved(3)
    assert said(tmp_path)[-1].ranking == (left, right)
    do("tie")
    do("save")
    person.saved(4)
    assert said(tmp_path)[-1].tie and said(tmp_path)[-1].ranking == ()

    # A group.
    do("groups")
    person.see("main.group[aria-busy=false]").to_be_visible()
    one, two, three = person.shown
    do("second")
    do("clear")
    person.see(".place").to_have_count(0)
    do("third")
    person.see("#save").to_be_disabled()
    do("second")
    person.see(".place").to_have_text(["3", "2", "1"])
    do("save")
    person.saved(5)
    assert said(tmp_path)[-1].ranking == (three, two, one)

    # What there is besides.
    do("help")
    person.see("#help").to_contain_text("score the answer")
    do("close help")
    person.see("#help").to_be_hidden()
    do("statistics")
    person.see("#stats-body").to_contain_text("judged5")
    person.see("#stats-body").to_contain_text("Ann6")
    do("close statistics")
    person.see("#stats").to_be_hidden()
    told = ScriptedRows(tmp_path, []).told()
    assert {"edit": "As it should be.", "id": said(tmp_path)[3].id} in told
    assert [each["reward"] for each in told if each.get("row") == first][:3] == [0.75, 0.5, 0.0]


def test_enter_saves_whatever_was_clicked_before(serve: Serve, arrive: Arrive, tmp_path: Path) -> None:
    person = arrive(serve(*spoken(4)))
    for count, clicked in enumerate((["score"], ["thumb"], ["label"], ["score", "verdict", "reference"]), start=1):
        person.ready()
        for each in clicked:
            person.click(ACTIONS[each][0])
        person.key("Enter")
        person.saved(count)
    found = [(each.score, each.thumb, each.labels) for each in said(tmp_path)]
    assert found == [(4, None, ()), (None, "down", ()), (None, None, ("wrong",)), (4, None, ())]
    person.key("a")
    person.ready()
    person.click(ACTIONS["score"][0])
    person.saved(5)
    person.see("#hint").to_contain_text("1 is 0, 5 is 1")
    expect(person.page.get_by_role("button", name="Pair 4", exact=True)).to_be_visible()
    person.key("a")
    person.click('[data-view="pair"]')
    person.see("main.pair[aria-busy=false]").to_be_visible()
    left, right = person.shown
    person.click(f'[data-id="{right}"]')
    person.key("Enter")
    person.saved(6)
    assert said(tmp_path)[-1].ranking == (right, left), "answers themselves can be clicked"
    (tmp_path / "running").unlink()
    person.key("0", "Enter")
    person.see("#toast").to_have_text("Saved. The run is not running.")
    person.saved(7)
    (tmp_path / "running").touch()
    person.key("0", "Enter")
    person.see("#toast").to_have_text("Saved.")


def test_keys_in_a_text_are_text_and_focused_buttons_act(serve: Serve, arrive: Arrive, tmp_path: Path) -> None:
    person = arrive(serve(*spoken(2)))
    person.ready()
    person.key("c")
    person.page.keyboard.type("s z 1?")
    person.see("#comment").to_have_value("s z 1?")
    person.key("Control+Enter")
    person.saved(1)
    assert said(tmp_path)[-1].comment == "s z 1?" and said(tmp_path)[-1].score is None
    person.key("5")
    person.page.focus("#comment")
    for _ in range(20):
        person.key("Tab")
        if person.page.evaluate("document.activeElement.id") == "skip":
            break
    person.key("Enter")
    person.see("#undo").to_be_enabled()
    person.see('[data-choice="score:5"]').to_have_attribute("aria-pressed", "false")
    assert [each.skipped for each in said(tmp_path)] == [False, True]


def test_two_people_see_different_answers_or_are_told(serve: Serve, arrive: Arrive, tmp_path: Path) -> None:
    url = serve(group("g", "only one"), group("h", "and one more"), lease_s=1.0)
    ann = arrive(url, "Ann")
    bob = arrive(url, "Bob")
    assert ann.shown != bob.shown
    ann.key("1", "Enter")
    bob.key("5", "Enter")
    ann.see("#empty").to_contain_text("Every answer has been judged")
    bob.see("#empty").to_be_visible()
    ann.key("z")
    [shown] = ann.shown
    # Bob comes to the same answer by a request of his own, as a window would whose lease was lost.
    bob.page.evaluate(
        """([item, key]) => fetch("v1/judge", {method: "POST", headers: {Authorization: `Bearer ${key}`},
        body: JSON.stringify({id: "0123456789", person: "Bob", item: `one:${item}`, rows: [item], score: 5})})""",
        [shown, KEY],
    )
    ann.key("Enter")
    ann.see("#toast").to_have_text("Saved. Bob had this item as well: both of you count.")
    told = [each["reward"] for each in ScriptedRows(tmp_path, []).told() if each["row"] == shown]
    assert told[-1] == 0.5
    ann.key("i")
    ann.see("#stats-body").to_contain_text("Krippendorff's alpha")


def test_what_is_typed_is_there_after_a_reload(serve: Serve, arrive: Arrive) -> None:
    person = arrive(serve(*spoken(5)))
    before = person.shown
    person.key("2", "Shift+Digit1", "c")
    person.write("half a thought")
    person.key("Escape", "e")
    person.write(" and more")
    person.key("Escape", "e")
    person.see("#answers textarea").to_have_count(0)
    person.page.reload()
    person.ready()
    person.key("e")
    person.see("#answers textarea").to_have_value(f"{_text_of(before[0])} and more")
    person.page.reload()
    assert person.shown == before
    person.see("#comment").to_have_value("half a thought")
    person.see("#answers textarea").to_have_value(f"{_text_of(before[0])} and more")
    person.see('[data-choice="score:2"]').to_have_attribute("aria-pressed", "true")
    person.see('[data-label="polite"]').to_have_attribute("aria-pressed", "true")
    person.see("#toast").to_have_text("What you typed here before is back.")
    assert "key" not in person.page.url, "the key does not stay in the address"
    person.key("Enter")
    person.saved(1)


def _text_of(row: str) -> str:
    name, _, at = row.partition("/")
    return f"{('First', 'Second', 'Third')[int(at)]} {name[1:]}."


def test_text_of_a_model_is_never_run(serve: Serve, arrive: Arrive) -> None:
    evil = "<script>window.pwned = 1</script><img src=x onerror='window.pwned = 1'>"
    turns = ({"role": "user", "content": f"Q {evil}"}, {"role": evil, "content": evil},
             {"role": "assistant", "content": f"A\n```{evil}\n{evil}\n```\n{evil}"})  # fmt: skip
    wicked = group("g", evil, f"{evil}2", turns=turns, error=evil, reward_components={evil: 1.0})
    person = arrive(serve(wicked, group("<b>h", evil)), f"<img src=x onerror=alert(1)>{'x' * 20}")
    for number in range(3):
        person.ready()
        person.key("v", "r", "e")
        person.key("Escape", "i")
        person.see("#stats").to_be_visible()
        person.key("Escape")
        person.see("#stats").to_be_hidden()
        person.key("1", "Enter")
        person.saved(number + 1)
    person.see("#empty").to_be_visible()
    assert person.page.evaluate("window.pwned") is None
    assert person.page.locator("main img, main script, dialog img").count() == 0
    ran = person.page.evaluate(
        "() => { try { document.body.innerHTML += '<i>x</i>'; return true; } catch { return false; } }"
    )
    assert not ran, "the policy would stop it, too"
    person.errors.clear()


def test_images_are_shown_and_what_comes_too_late_is_said(serve: Serve, arrive: Arrive, tmp_path: Path) -> None:
    pixel = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
    (tmp_path / "a.png").write_bytes(base64.b64decode(pixel))
    images = (str(tmp_path / "a.png"),)
    person = arrive(serve(group("late", "x", images=images, stop_reason="late", waiting=False)))
    person.see("#context img").to_have_js_property("naturalWidth", 1)
    person.ready()
    person.key("5", "Enter")
    person.see("#toast").to_contain_text("Kept, but too late for the run: the row was taken for the step")


def test_on_a_phone_everything_is_in_reach_of_a_thumb(serve: Serve, arrive: Arrive) -> None:
    phone = {"viewport": {"width": 390, "height": 780}, "is_mobile": True, "has_touch": True}
    person = arrive(
        serve(group("g", "x" * 300, "```\n" + "y" * 300 + "\n```", "third"), *spoken(1200), levels=9), **phone
    )
    for view in ("one", "pair", "group"):
        person.page.tap(f'[data-view="{view}"]')
        person.see(f'[data-view="{view}"]').to_have_attribute("aria-pressed", "true")
        person.ready()
        assert person.page.evaluate("document.documentElement.scrollWidth") == 390, "nothing is beside the window"
        for button in person.page.locator("#dock button").all():
            box = button.bounding_box()
            assert box["height"] >= 44 and box["width"] >= 44 and box["x"] >= 0 and box["x"] + box["width"] <= 390
            assert box["y"] + box["height"] <= 780
    person.page.tap('[data-choice="rank:0"]')
    person.page.tap('[data-choice="rank:1"]')
    person.see(".place").to_have_count(3)
    person.page.tap("#save")
    person.saved(1)
