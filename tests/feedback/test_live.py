"""The page on Ray Serve, beside a real Buffer: what is killed comes back with all that people said."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
from ray import serve
from typer.testing import CliRunner

import rayrft
from rayrft.buffer.reader import Archive
from rayrft.cli.main import app
from rayrft.config import dump_config, load_config
from rayrft.config.serve import FeedbackConfig, ViewerConfig
from rayrft.core.services import OpenService, deploy_viewer, serve_feedback
from rayrft.errors import ConfigError
from rayrft.experience import Experience
from rayrft.feedback.journal import FILE, read_journal
from rayrft.runtime.handle import until_dead
from rayrft.runtime.serving.applications import applications
from tests.buffer.live import FakeMaster, buffers, put
from tests.buffer.rows import group, plan
from tests.e2e.conftest import free_port, small_config
from tests.errors import about

pytestmark = pytest.mark.usefixtures("ray_cluster")


class Setting:
    """A run under way, as far as its Buffer goes, which a test may kill and start again, and its page."""

    def __init__(self, storage: Path, start: Callable[..., Any], model: Path) -> None:
        self.config = load_config(small_config(storage, "judged"))
        self.folder, self._start = self.config.folder, start
        self.start_buffer()
        (self.folder / "config.yaml").write_text(dump_config(self.config))
        shutil.copytree(model, self.folder / "model")
        for number in range(8):
            put(self.buffer, spoken(number))
        self.page = self.open()

    def start_buffer(self) -> None:
        self.buffer = self._start(self.folder / "buffer", name="judged:buffer")
        ray.get(self.buffer.stats.remote())

    def kill_buffer(self) -> None:
        watching = self.buffer.watch.remote()
        ray.kill(self.buffer)
        ray.wait([watching])

    def open(self) -> OpenService:
        return serve_feedback(self.folder, FeedbackConfig(port=PORT))

    def ask(self, path: str, **body: Any) -> dict[str, Any]:
        url, key = access(self.page)
        headers = {"Authorization": f"Bearer {key}"}
        response = httpx.post(f"{url}v1/{path}", json={"person": "Ann", **body}, headers=headers, timeout=60)
        assert response.status_code == 200, response.text
        return response.json()

    def judge(self, row: str, **what: Any) -> dict[str, Any]:
        return self.ask("judge", id=f"{row.replace('/', '-')}-judged", item=f"one:{row}", rows=[row], **what)

    def found(self, row: str) -> Any:
        return Archive.of_run(self.folder).find(row)


PORT = free_port()


def access(page: OpenService) -> tuple[str, str]:
    """The page's URL and its key."""
    assert page.key_file is not None
    return page.url, page.key_file.read_text().strip()


def spoken(number: int) -> list[Experience]:
    """A group of three answers that were said."""
    question = {"role": "user", "content": f"Spell word {number} backward"}
    return [
        row.with_fields(turns=(question, {"role": "assistant", "content": f"answer {at}"}))
        for at, row in enumerate(group(number, rows=3))
    ]


@pytest.fixture(scope="module")
def setting(ray_cluster: Any, tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Setting]:
    assert not applications()
    serve.shutdown()  # which other modules may have left running, at another port
    with buffers() as start:
        made = Setting(tmp_path_factory.mktemp("runs"), start, tiny_model)
        yield made
        made.page.stop()
        serve.shutdown()


def wait_for(true: Callable[[], bool]) -> None:
    ends = time.monotonic() + 60
    while not true():
        assert time.monotonic() < ends
        time.sleep(0.05)


def edits(setting: Setting) -> list[str]:
    """The edited answers that the run has as demonstrations."""
    archive = Archive.of_run(setting.folder)
    if "expert/human" not in archive.stores:
        return []
    batches = list(archive.rows("expert/human"))
    return [dict(turns[-1])["content"] for batch in batches for turns in batch.column("turns").to_pylist()]


def test_judgements_change_the_rows_of_a_run_under_way_before_they_are_trained(setting: Setting) -> None:
    taken = setting.ask("next", view="one")
    assert taken["left"] == {"one": 24, "pair": 8, "group": 8} and taken["running"]
    assert setting.judge("1/0", score=5, comment="good")["outcome"] == "applied"
    found = setting.found("1/0").experience
    assert found.reward == 1.0 and found.labels == {"score": "5", "comment": "good", "people": "Ann"}
    undone = setting.ask("undo")
    assert undone["outcome"] == "applied" and setting.found("1/0").experience.reward == group(1, rows=3)[0].reward
    shown = httpx.get(setting.page.url)
    assert shown.status_code == 200 and "page.js" in shown.text
    short = httpx.get(setting.page.url.rstrip("/"), follow_redirects=True)
    assert str(short.url).endswith("/judged/") and short.text == shown.text


def test_an_edited_answer_is_a_demonstration_of_the_run_under_its_template(setting: Setting) -> None:
    row = "2/1"
    assert setting.judge(row, edit="cat")["outcome"] in ("applied", "kept"), "a tokenizer is loaded for the first one"
    wait_for(lambda: "cat" in edits(setting))
    archive = Archive.of_run(setting.folder)
    made = archive.find("human/2-1-judged").experience
    own = archive.find(row).experience
    from rayrft.data.tokenizer import ChatTokenizer

    answer = ChatTokenizer(setting.folder / "model").response("cat")
    assert made.token_ids.tolist() == [*own.token_ids[:1].tolist(), *answer]
    assert made.action_mask.tolist() == [0] + [1] * len(answer) and made.source == "expert"
    assert made.turns == (own.turns[0], {"role": "assistant", "content": "cat"}) and made.task_id == own.task_id
    assert archive.find("human/2-1-judged").group_status is None and setting.ask("undo")["outcome"] == "applied"
    assert Archive.of_run(setting.folder).find("human/2-1-judged").group_status == "excluded", "it is drawn no more"


def test_a_row_that_was_trained_meanwhile_is_said_to_be(setting: Setting) -> None:
    ray.get(setting.buffer.open_stage.remote(plan(1, scheduled=False)))
    lease = ray.get(setting.buffer.lease.remote(0, 1, 5))
    [leased] = [f"{number}/0" for number in range(8) if setting.found(f"{number}/0").group_status == "leased"]
    said = setting.judge(leased, score=1)
    assert said["outcome"] == "late" and "was taken for the step" in said["reason"], lease
    assert setting.found(leased).late_feedback[0].reward == 0.0


def test_a_buffer_that_is_killed_gets_what_was_said_meanwhile(setting: Setting) -> None:
    setting.kill_buffer()
    said = setting.judge("5/0", thumb="up", edit="dog")
    assert said["outcome"] == "kept" and not said["running"]
    setting.start_buffer()
    wait_for(lambda: setting.found("5/0").experience.reward == 1.0)
    wait_for(lambda: "dog" in edits(setting))


def test_a_page_that_is_killed_goes_on_with_the_journal(setting: Setting) -> None:
    judged = setting.judge("6/2", thumb="up")["mine"]["judged"]
    [actor] = [actor for actor in ray.util.list_named_actors(all_namespaces=True) if "judged:feedback" in actor["name"]]
    ray.kill(ray.get_actor(actor["name"], namespace="serve"), no_restart=True)

    def answers() -> bool:
        url, key = access(setting.page)
        try:
            body = {"person": "Ann"}
            response = httpx.post(f"{url}v1/me", json=body, headers={"Authorization": f"Bearer {key}"}, timeout=5)
        except httpx.TransportError:
            return False
        return response.status_code == 200 and response.json()["mine"]["judged"] == judged

    wait_for(answers)
    before = len(read_journal(setting.folder / "feedback" / FILE))
    assert setting.judge("6/2", thumb="up")["mine"]["judged"] == judged, "the same judgement"
    assert len(read_journal(setting.folder / "feedback" / FILE)) == before


def test_there_is_one_page_and_it_ends_and_comes_back_with_another_key(setting: Setting, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, check=about("name", "feedback/judged")):
        setting.open()
    url, key = access(setting.page)
    setting.page.stop()
    out = tmp_path / "answers.jsonl"
    arguments = ["data", "feedback", "export", str(setting.folder), str(out), "--format", "answers"]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    sent = [entry for entry in read_journal(setting.folder / "feedback" / FILE) if entry.kind == "edit_sent"]
    edits = sum(-1 if entry.withdrawn else 1 for entry in sent)
    assert result.exit_code == 0 and f"{edits} rows" in result.output and edits > 0, result.output
    records = tmp_path / "records.jsonl"
    records.write_text('{"id": "6/0", "responses": {"score": [{"value": 5, "user_id": "argilla-user"}]}}\n')
    arguments = ["data", "feedback", "import", str(setting.folder), str(records)]
    assert "1 judgements imported, 0 were there" in CliRunner().invoke(app, arguments, catch_exceptions=False).output
    assert "0 judgements imported, 1 were there" in CliRunner().invoke(app, arguments, catch_exceptions=False).output
    master = ray.remote(FakeMaster).options(num_cpus=0, name="judged:master").remote(setting.folder)
    ray.get(master.status.remote())
    setting.page = rayrft.attach("judged").serve_feedback(port=PORT)
    ray.kill(master)
    assert setting.page.url == url and access(setting.page)[1] != key, "a key is renewed at each start"
    assert httpx.get(f"{url}v1/stats", headers={"Authorization": f"Bearer {key}"}).status_code == 401
    assert key not in repr(setting.page) + setting.page._repr_html_() and "feedback/key" in setting.page._repr_html_()
    wait_for(lambda: setting.found("6/0").experience.reward == 1.0)
    assert (setting.folder / "feedback" / "key").stat().st_mode & 0o077 == 0


def test_the_command_serves_until_it_is_interrupted(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    setting.page.stop()
    answered: list[int] = []

    def interrupt(anchor: Any) -> None:
        answered.append(httpx.get(f"http://127.0.0.1:{PORT}/feedback/judged/").status_code)
        os.kill(os.getpid(), signal.SIGINT)
        until_dead(anchor)

    monkeypatch.setattr("rayrft.cli.main.until_dead", interrupt)
    result = CliRunner().invoke(app, ["serve", "feedback", str(setting.folder), f"port={PORT}"])
    assert (result.exit_code, answered) == (130, [200]), result.output
    assert f"feedback page at http://127.0.0.1:{PORT}/feedback/judged/; its key is in {setting.folder}" in result.output
    assert "judged:feedback" not in serve.status().applications
    setting.page = setting.open()


def test_the_viewer_on_ray_serve_has_the_page_and_gives_the_run_its_judgements(
    setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    setting.page.stop()  # a run has one page at a time
    viewer = deploy_viewer(setting.folder.parent, ViewerConfig(port=PORT))
    try:
        url, key = access(viewer)
        headers = {"Authorization": f"Bearer {key}"}
        assert url.endswith("/viewer/") and "page.js" in httpx.get(url).text
        runs = httpx.get(f"{url}v1/runs", headers=headers, timeout=60)
        assert [run["run"] for run in runs.json()["runs"]] == ["judged"], runs.text
        page = f"{url}feedback/judged/"
        assert "store.js" in httpx.get(f"{page}page.js").text
        body = {"person": "Eve", "id": "of-the-viewer", "item": "one:7/1", "rows": ["7/1"], "score": 1}
        assert httpx.post(f"{page}v1/judge", json=body, timeout=60).status_code == 401
        said = httpx.post(f"{page}v1/judge", json=body, headers=headers, timeout=60)
        assert said.status_code == 200 and said.json()["outcome"] in ("applied", "kept"), said.text
        wait_for(lambda: setting.found("7/1").experience.reward == 0.0)
        assert httpx.get(f"{url}feedback/none/", headers=headers).status_code == 404
    finally:
        viewer.stop()
    setting.page = setting.open()
