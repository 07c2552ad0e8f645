"""Command-line agents as workflows: they run unmodified, reach their model and nothing else, and cost one attempt."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from rayrft.endpoint.program import Program
from rayrft.errors import ConfigError
from rayrft.explorer.rollout import Rollout
from rayrft.explorer.workflows import register_workflow
from rayrft.rewards.sandbox import Sandbox, isolate
from tests.endpoint.scripted import Ran, running
from tests.errors import about

pytestmark = pytest.mark.asyncio(loop_scope="module")
SOURCE = Path(__file__).with_name("program.py").read_text()
PYTHON = Sandbox().python[0]
CHECK = "from solution import double\nassert double(4) == 8\n"


@pytest.fixture(scope="module")
async def run(tiny_model: Path) -> AsyncIterator[Callable[..., Ran]]:
    """Runners of the program by its options and limits: those with the same ones share processes, of which the first
    takes seconds to start."""
    programs, names = list[Program](), dict[str, str]()

    def make(options: Any = None, deadline_s: float = 60.0, **limits: Any) -> Ran:
        name = names.setdefault(repr([options, limits]), f"program {len(names)}")
        if len(names) > len(programs):
            programs.append(program := Program([PYTHON, "-S", "agent.py", "{question}"], **(options or {})))
            register_workflow(name)(lambda: program)
        return Ran(tiny_model, name, {}, **{"explorer.deadline_s": deadline_s, **limits})

    yield make
    await asyncio.gather(*(program.close() for program in programs))


Run = Callable[..., Ran]
CHECKED = {"check": [PYTHON, "-S", "tests/check.py"], "environment": {"PYTHONPATH": "."}}


async def attempt(ran: Ran, what: str, n: int = 1, question: str = "cat", **metadata: Any) -> Rollout:
    """Run the program, which does ``what``."""
    files = {"agent.py": SOURCE, **metadata.pop("files", {})}
    return await ran(f"{what} {question}", n, files=files, **metadata)


async def test_the_calls_of_a_program_are_a_row_and_its_output_is_scored(run: Run) -> None:
    question = "What {question} says: `$(reboot)` {url}?"
    rollout = await attempt(ran := run(), "talks", n=2, question=question)
    assert rollout.problem is None and ran.scored == ["Final: dog"] * 2
    for row in rollout.rows:
        assert [turn["content"] for turn in row.turns][::2] == [question, "Sure?"]
        assert (row.reward, row.stop_reason) == (10.0, "stop")


async def test_the_calls_of_what_a_program_starts_are_further_rows(run: Run) -> None:
    rollout = await attempt(ran := run(), "delegates")
    assert [row.turns[0]["content"] for row in rollout.rows] == ["cat", "Check dog"]
    assert [row.reward for row in rollout.rows] == [3.0, 3.0] and ran.scored == ["dog"]


async def test_a_file_that_a_program_left_is_scored(run: Run) -> None:
    ran = run({"answer": "sub/answer.txt"})
    rollout = await attempt(ran, "writes", files={"given/hint.txt": "barks"})
    assert ran.scored == ["dog barks"] and not rollout.failed
    await attempt(ran, "talks")
    assert ran.scored == ["dog barks", ""]


@pytest.mark.parametrize(("what", "reward"), [("solves", 1.0), ("talks", 0.0)])
async def test_tests_that_a_program_cannot_see_give_its_reward(what: str, reward: float, run: Run) -> None:
    check_files = {"tests/check.py": f"import sys; sys.path.insert(0, '.')\n{CHECK}"}
    rollout = await attempt(ran := run(CHECKED), what, check_files=check_files)
    assert [row.reward for row in rollout.rows] == [reward] and ran.scored == []


async def test_a_check_without_files_fails_its_attempt(run: Run) -> None:
    rollout = await attempt(run(CHECKED), "talks")
    assert rollout.failed == {"workflow_error": 1} and "metadata.check_files" in str(rollout.problem)


@pytest.mark.parametrize("isolation", ["bwrap", "unshare"])
async def test_a_program_reaches_its_model_and_nothing_else(
    isolation: str, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    try:
        isolate(isolation, (), lenient=True)
    except ConfigError as error:
        pytest.skip(str(error))
    monkeypatch.setenv("MY_SECRET_KEY", "abc")
    server = socket.create_server(("127.0.0.1", 0))
    environment = {"SERVER": "{}:{}".format(*server.getsockname()), "OUTSIDE": str(tmp_path)}
    ran = run({"environment": environment, "isolation": isolation})
    rollout = await attempt(ran, "looks")
    assert rollout.problem is None
    assert [json.loads(each) for each in ran.scored] == [[[], [], 0, False, False]]


async def test_a_program_that_fails_or_grows_costs_its_attempt_alone(run: Run) -> None:
    ran = run()
    rollout = await attempt(ran, "fails", n=2)
    assert rollout.failed == {"workflow_error": 2} and "no such customer" in str(rollout.problem)
    [problem] = ran.runner.take_problems().values()
    assert "no such customer" in problem and "\n" not in problem
    assert (await attempt(ran, "fails")).failed and ran.runner.take_problems() == {}
    rollout = await attempt(ran := run({"status": "any", "memory_mib": 256}), "fails")
    assert not rollout.failed and ran.scored == [""]
    rollout = await attempt(ran, "grows")
    assert rollout.failed == {"workflow_error": 1} and "memory" in str(rollout.problem)


async def test_a_program_that_hangs_is_killed_with_what_it_started(run: Run) -> None:
    rollout = await attempt(run(deadline_s=5.0), "hangs")
    assert rollout.failed == {"timeout": 1}
    async with asyncio.timeout(20):
        while _sleeping():  # noqa: ASYNC110 - nobody tells of the end of a process
            await asyncio.sleep(0.01)


def _sleeping() -> list[str]:
    found = []
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if process.name.isdigit() and (process / "cmdline").read_bytes() == b"/bin/sleep\x001000\x00":
                found.append(process.name)
    return found


WRITES = {"file_path": "/box/answer.txt", "content": "forty-two"}
PROVIDER = 'model_providers.here={name="here",base_url="{base_url}",env_key="OPENAI_API_KEY",wire_api="responses"}'
CODEX = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "-c", PROVIDER]
CODEX += ["-c", "model_provider=here"]
AGENTS: dict[str, tuple[list[str], dict[str, str], tuple[str, dict[str, str]]]] = {
    "@anthropic-ai/claude-code": (
        ["@anthropic-ai/claude-code-linux-*/claude", "--dangerously-skip-permissions", "-p", "{question}"],
        {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"},
        ("Write", WRITES),
    ),
    "@qwen-code/qwen-code": (
        ["@qwen-code/qwen-code/cli.js", "-y", "-p", "{question}"],
        {"OPENAI_MODEL": "policy"},
        ("write_file", WRITES),
    ),
    "@openai/codex": (
        ["@openai/codex-linux-*/vendor/*/bin/codex", "exec", "-m", "policy", *CODEX, "{question}"],
        {"CODEX_HOME": "/box"},
        ("exec_command", {"cmd": "printf forty-two > /box/answer.txt"}),
    ),
}
"""The program below ``node_modules`` and its arguments, its environment, and the tool with which it writes a file."""


@pytest.mark.slow
@pytest.mark.parametrize("agent", AGENTS)
async def test_real_agents_use_their_tools_and_their_files_are_scored(
    tiny_model: Path, tmp_path: Path, agent: str
) -> None:
    """Each is asked for a file, and told by the scripted policy to write it with its own tool."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("there is no npm to install agents with")
    os.chmod(tmp_path, 0o755)
    command = [npm, "install", "--prefix", str(tmp_path), agent]
    installed = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True)
    if installed.returncode:
        pytest.skip(f"npm does not install {agent}: {installed.stderr[-200:]}")
    (place, *arguments), environment, (tool, given) = AGENTS[agent]
    [program] = (tmp_path / "node_modules").glob(place)
    command = [*(["node"] if program.suffix == ".js" else []), str(program), *arguments]
    options = {"command": command, "environment": environment, "folders": [str(tmp_path)], "answer": "answer.txt"}
    limits = {"model.max_length": 2_000_000, "explorer.sampling.max_tokens": 400, "explorer.deadline_s": 300.0}
    call = json.dumps({"name": tool, "arguments": given})

    def say(prompt: str) -> str:
        return "Done." if "forty-two" in prompt else f"<tool_call>{call}</tool_call>"

    async with running(tiny_model, "program", options, say, **limits) as ran:
        rollout = await ran("Write the answer to everything into answer.txt")
    assert rollout.problem is None and ran.scored == ["forty-two"]
    [row] = rollout.rows
    assert [turn["role"] for turn in row.turns][-3:] == ["assistant", "tool", "assistant"]
    assert row.turns[-1]["content"] == "Done."


async def test_stdin_and_environment_have_the_question_and_the_key(run: Run) -> None:
    ran = run({"stdin": "{question} {other}", "environment": {"X": "{api_key}"}})
    await attempt(ran, "reads")
    assert ran.scored == ["READS CAT {OTHER}"]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"command": "claude -p"}, "command"),
        ({"command": []}, "command"),
        ({"command": ["no-such-agent"]}, "command"),
        ({"command": ["sh"], "check": ["no-such-test"]}, "check"),
        ({"command": ["/no/such/agent"]}, "command"),
        ({"command": ["sh"], "check": []}, "check"),
        ({"command": ["sh"], "folders": ["/no/such"]}, "folders"),
        ({"command": ["sh"], "status": "one"}, "status"),
        ({"command": ["sh"], "isolation": "runsc"}, "isolation"),
    ],
)
async def test_a_program_that_cannot_run_is_an_error_before_the_start(options: Any, field: str) -> None:
    with pytest.raises(ConfigError, check=about(field)):
        Program(**options)


async def test_a_program_outside_of_the_folders_is_an_error_that_names_them(tmp_path: Path) -> None:
    agent = tmp_path / "agent"
    agent.write_text("#!/bin/sh\n")
    for path in agent, *tmp_path.parents[:2], tmp_path:
        path.chmod(0o755)
    with pytest.raises(ConfigError, check=about("command", str(agent))) as error:
        Program([str(agent)])
    assert "`folders`" in error.value.remedy
    await Program([str(agent)], folders=[str(tmp_path)]).close()


@pytest.mark.parametrize(
    ("options", "reward", "scored"),
    [({}, None, ["d"]), ({"answer": "a.txt"}, 0.0, [""]), ({"check": [PYTHON, "-c", ""]}, 0.0, [])],
)
async def test_a_program_that_fails_since_an_answer_was_cut_has_its_row(
    options: dict[str, Any], reward: float | None, scored: list[str], run: Run
) -> None:
    rollout = await attempt(ran := run(options, **{"explorer.sampling.max_tokens": 1}), "fails", check_files={})
    assert not rollout.failed and [row.stop_reason for row in rollout.rows] == ["length"]
    assert [row.reward for row in rollout.rows] == [reward] and ran.scored == scored


async def test_a_prompt_without_room_names_the_limit(run: Run) -> None:
    rollout = await attempt(run(), "talks", question="cat " * 200)
    assert rollout.failed == {"prompt_too_long": 1} and "model.max_length" in str(rollout.problem)


@pytest.mark.parametrize("files", [["a"], {"/etc/x": "y"}, {"../x": "y"}, {"x": 3}])
async def test_files_outside_of_the_folder_fail_their_attempt(files: Any, run: Run) -> None:
    rollout = await run()("talks cat", files=files)
    assert rollout.failed == {"workflow_error": 1} and "metadata.files" in str(rollout.problem)
