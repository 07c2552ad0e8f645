"""Bad input from the command line: non-zero within seconds, one clear sentence, no actor started."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rayrft
from rayrft.config import load_config
from rayrft.core.preflight import prepare
from rayrft.errors import ConfigError, DataError, ModelError, RayrftError
from tests.e2e.conftest import Call, small_config
from tests.errors import about

TOOL = "tests.explorer.sample_tools:multiply"


def attempt(tmp_path: Path, **overrides: Any) -> None:
    prepare(load_config(small_config(tmp_path, "bad"), overrides), "run")


def test_a_misspelt_key_on_the_command_line(rayrft: Call, config_file: Callable[..., Path]) -> None:
    result = rayrft("run", str(config_file("bad")), "trainer.rank=2")
    assert result.returncode == 1
    assert result.stderr.strip() == "error: trainer.rank: unknown key (found 'rank'). Did you mean 'ranks'?"


def test_too_few_resources_on_the_command_line(rayrft: Call, config_file: Callable[..., Path]) -> None:
    result = rayrft("run", str(config_file("bad")), "explorer.engine.count=50")
    assert result.returncode == 1
    assert "the run needs 18.3 CPU and the cluster has" in result.stderr and result.stderr.count("\n") == 1
    assert "bad:engines" in result.stdout, "the plan is shown before it is refused"


@pytest.mark.parametrize("content", [None, ""])
def test_a_missing_or_empty_file(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "tasks.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(DataError, check=about("tasks.sources.0.path", str(path))):
        attempt(tmp_path, tasks={"sources": [{"source": "file", "path": str(path)}], "eval_size": 1})


def test_a_field_that_the_file_does_not_have(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"query": "q", "answer": "a"}\n')
    for named, said in (({}, "columns: query, answer"), ({"question": "queri"}, r"'queri' in .*tasks\.jsonl")):
        with pytest.raises(DataError, match=said):
            attempt(tmp_path, tasks={"sources": [{"path": str(path), **named}], "eval_size": 1})


def test_answers_of_tasks_that_are_too_long_to_be_shown_are_left_out(tmp_path: Path) -> None:
    words = {"tasks.sources.0.options": {"min_word_len": 3, "max_word_len": 4}}
    plain = prepare(load_config(small_config(tmp_path, "plain"), words), "run")
    lengths = [len(row.token_ids) for row in plain.demonstrations["gold"]]
    longest = max(lengths)
    limits = {"model.max_length": longest - 1, "sampling.max_prompt_tokens": longest - 2, "sampling.max_tokens": 1}
    overrides = {key.replace("sampling", "explorer.sampling"): limit for key, limit in limits.items()}
    prepared = prepare(load_config(small_config(tmp_path, "short"), words | overrides), "run")
    assert f"demonstrations 'gold': {lengths.count(longest)} left out as too long" in prepared.notices
    assert prepared.limits.max_length == longest - 1


def broken_reward() -> Any:
    def score(task: Any, response: str) -> float:
        raise ValueError("bad reward")

    return score


@pytest.mark.parametrize(
    ("overrides", "error", "field", "value"),
    [
        ({"model": {"path": "no/such-model", "max_length": 48}}, ModelError, "model.path", "no/such-model"),
        ({"model": {"path": "empty", "max_length": 48}}, ModelError, "model.path", "empty"),
        ({"model": {"path": "tiny", "max_length": 4096}}, ModelError, "model.max_length", 4096),
        ({"storage": "file"}, ConfigError, "storage", None),
        ({"explorer.workflow": "single_trun"}, ConfigError, "explorer.workflow", "single_trun"),
        ({"reward.name": f"{__name__}:broken_reward"}, ConfigError, "reward.name", None),
    ],
)
def test_what_a_run_needs_is_named_if_it_is_missing_or_broken(
    overrides: dict[str, Any],
    error: type[RayrftError],
    field: str,
    value: Any,
    tmp_path: Path,
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("file").touch()
    Path("tiny").symlink_to(tiny_model)
    with pytest.raises(error, check=about(field, *([] if value is None else [value]))):
        attempt(tmp_path, **overrides)


def test_a_tokenizer_without_eos(tmp_path: Path, tiny_model: Path) -> None:
    from transformers import AutoTokenizer

    folder = shutil.copytree(tiny_model, tmp_path / "no-eos")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(folder)
    with pytest.raises(ModelError, match="no EOS token"):
        attempt(tmp_path, model={"path": str(folder), "max_length": 48})


@pytest.mark.parametrize("tools", [True, False])
def test_a_template_whose_calls_nothing_reads(tools: bool, tmp_path: Path) -> None:
    """What calls tools is refused, and an endpoint, on which nobody may call any, notes it."""
    template = tmp_path / "strange.jinja"
    template.write_text(
        ("{% if tools %}{{ tools | tojson }}{% endif %}" if tools else "")
        + "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
        "{% for c in m.tool_calls or [] %}~{{ c.function }}~{% endfor %}"
        "{% if m.role == 'assistant' %}<|eos|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    given = {"model.template.file": str(template), "explorer.sampling.max_prompt_tokens": 2000}
    given["model.max_length"] = 4000
    calling = {"explorer.workflow": "tool_calling", "explorer.workflow_options.tool_calling.tools": [TOOL]}
    served = {**given, "serve": {"record": False}} | ({} if tools else calling)
    shown = prepare(load_config(small_config(tmp_path, "served"), served), "run").notices
    found = "none of vLLM's parsers" if tools else "the chat template shows calls, but no tools"
    assert any(notice.startswith(f"serve.tool_calls: {found}") for notice in shown), shown
    if tools:
        with pytest.raises(ConfigError, check=about("explorer.workflow_options.tool_calling")) as refused:
            attempt(tmp_path, **given, **calling)
        assert "register_call_format" in refused.value.remedy


def test_an_unknown_attribute_of_the_package() -> None:
    with pytest.raises(AttributeError, match="no attribute 'strat'"):
        _ = rayrft.strat  # type: ignore[attr-defined]
