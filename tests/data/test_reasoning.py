"""Reasoning and answer are told apart in one place, and nothing reads an answer from reasoning."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from rayrft.data.reasoning import ReasoningSplit, opened_reasoning, split_reasoning
from rayrft.data.tokenizer import ChatTokenizer
from rayrft.endpoint.decoding import AnswerText
from rayrft.experience import Task
from rayrft.explorer.environments.gymnasium import find_action
from rayrft.explorer.tools.call_formats import HermesCalls
from rayrft.rewards import Transcript, build_reward
from rayrft.rewards.base import score
from rayrft.trainer.tiny import make_tokenizer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("7", "7"),
        ("\n 7", "\n 7"),
        ("<think>5</think>\n\n7", "7"),
        ("5</think> 7", " 7"),
        ("<think>5", ""),
        ("<think>5</think>6<think>7</think>8", "8"),
        ("<think>5</think>7<think>8", ""),
        ("<think>5</think>", ""),
        ("", ""),
    ],
)
def test_the_answer_follows_the_last_reasoning_that_is_closed(text: str, answer: str) -> None:
    reasoning, found = split_reasoning(text)
    assert found == answer and reasoning + found == text


@pytest.mark.parametrize(
    ("prompt", "opening"),
    [
        ("<|user|>hi<|assistant|>", ""),
        ("<|user|>hi<|assistant|><think>\n", "<think>\n"),
        ("<|user|><think>hi</think><|assistant|><think>", "<think>"),
        ("<|user|>hi<|assistant|><think>\n\n</think>\n\n", ""),
    ],
)
def test_a_prompt_opens_reasoning_if_it_does_not_close_it(prompt: str, opening: str) -> None:
    assert opened_reasoning(prompt) == opening


@pytest.mark.parametrize(
    ("name", "options", "right", "wrong", "metadata"),
    [
        ("math", {}, r"so \boxed{7}", r"so \boxed{5}", {}),
        ("k12", {}, "The answer is 7.", "The answer is 5.", {"type": "number"}),
        ("vision", {}, "There are 7.", "There are 5.", {"type": "count"}),
        ("exact", {}, "7", "5", {}),
    ],
)
async def test_no_reward_reads_the_reasoning(
    name: str, options: dict[str, Any], right: str, wrong: str, metadata: dict[str, Any]
) -> None:
    task = Task.create("test", "3 + 4?", "7", metadata=metadata)
    for text, value in [
        (f"<think>{wrong}</think>{right}", 1.0),
        (f"{wrong}</think>\n\n{right}", 1.0),
        (f"<think>{right}</think>{wrong}", 0.0),
        (f"<think>{right}</think>", 0.0),
        (f"<think>{right}", 0.0),
    ]:
        result = await score(build_reward(name, options), task, Transcript.of(task, text))
        assert result.value == value, (text, result)


async def test_actions_and_calls_of_tools_in_reasoning_are_not_meant() -> None:
    assert find_action("<think>left, or <answer>up</answer>?</think>right", (("left",), ("right",), ("up",))) == 1
    call = '<tool_call>{"name": "stop", "arguments": {}}</tool_call>'
    assert len(await HermesCalls().read(f"<think>{call}</think>{call}", ())) == 1
    assert not await HermesCalls().read(f"<think>{call}", ())


_TURNS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if m.role == 'assistant' %}<|eos|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MARKS = {
    "qwen3": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "seed_oss": ("<seed:think>", "</seed:think>"),
    "minimax_m3": ("<mm:think>", "</mm:think>"),
    "hy_v3": ("<think:ab>", "</think:ab>"),
    "plamo3": ("<|plamo:begin_think:plamo|>", "<|plamo:end_think:plamo|>"),
    "gemma4": ("<|channel>thought\n", "<channel|>"),
    "openai_gptoss": ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"),
}
"""Marks by the name of vLLM's parser."""
SAME_MARKS = {
    *("deepseek_r1", "deepseek_v3", "deepseek_v4", "deepseek_v41", "poolside_v1", "ernie45", "glm45", "glm47", "ling3"),
    *("granite_thinking_parser", "holo2", "hunyuan_a13b", "kimi_k2", "mimo", "minicpmv", "minimax_m2"),
    *("minimax_m2_append_think", "nemotron_v3", "olmo3", "step3", "step3p5"),
}
"""Parsers of ``<think>`` and ``</think>``."""
UNREAD = {
    "granite": "Here is my thought process: 5 Here is my response: 7",
    "inkling": "<|content_thinking|>5<|end_message|>",
    "k2_horizon": "<ifm|think>5</ifm|think>",
    "kimi_k3": "<|open|>think<|sep|>5<|close|>think<|sep|>",
    "muse_glimmer": "<|start|>assistant to=self<|message|>5<|eom|>",
    "<odd:think>": "<odd:think>5</odd:think>",
}
"""Reasoning in a chat template that is not read, by the name of its form."""
NOT_OF_ONE_FORM = {"hf", "hy_v4", "cohere_command3", "cohere_command4"}
"""Parsers of any form, of that of hy_v3, and two that need a package that is not installed."""


def tokenizer_of(folder: Path, *marks: str, template: str = _TURNS) -> ChatTokenizer:
    special = sorted(
        {token for mark in marks for token in re.findall(r"<[^<>\s'\"{}%=+]{2,40}>|\[/?[A-Z_]{4,}\]", mark)}
    )
    make_tokenizer([], ["\uff5c\u2581"], special=special, template=template).save_pretrained(folder)
    return ChatTokenizer(folder)


@pytest.mark.parametrize("name", MARKS)
def test_reasoning_is_split_as_vllm_s_parser_splits_it_token_by_token(name: str, tmp_path: Path) -> None:
    tokenizer, (opening, closing) = tokenizer_of(tmp_path, *MARKS[name], "[TOOL_CALLS]", "[ARGS]"), MARKS[name]
    texts = [f"{opening}5, or 6?{closing}7", f"{opening}5", f"{opening}{closing}7", f"{opening}5{closing}"]
    if name == "openai_gptoss":
        again, note = "<|end|><|start|>assistant" + opening, "<|channel|>commentary<|message|>I look."
        texts += [f"{opening}5{again}6{closing}7", note + closing + "7", "<|channel|>final<|message|>7"]
    for text in texts:
        ids, split = tokenizer.tokens(text), ReasoningSplit()
        answer = AnswerText(tokenizer)
        for token in ids:
            answer.add([token])
            split.add(answer.show())
        split.add(answer.end())
        split.end()
        assert (split.reasoning, split.content) == parsed_by_vllm(name, tokenizer, text, ids), text
        assert answer.text == tokenizer.answer(ids)
        assert split_reasoning(answer.text)[1] == split.content, "rewards see the content alone"


def parsed_by_vllm(name: str, tokenizer: ChatTokenizer, text: str, ids: list[int]) -> tuple[str, str]:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.parser import ParserManager

    if name == "openai_gptoss":  # its parser has the model's own vocabulary
        from vllm.parser.harmony import get_encoding

        ids = get_encoding().encode(text, allowed_special="all")
    if name == "hy_v3":
        tokenizer.hf.init_kwargs["token_suffix"] = ":ab"
    parser = ParserManager.get_parser(reasoning_parser_name=name, is_harmony=name == "openai_gptoss")
    assert parser is not None
    request = ChatCompletionRequest(messages=[{"role": "user", "content": "?"}])
    made = parser(tokenizer.hf, [], chat_template_kwargs={"reasoning_effort": "high"})
    reasoning, content, _ = made.parse(text, request, False, ids)
    return reasoning or "", content or ""


def test_each_form_of_reasoning_that_vllm_knows_is_read_or_named(tmp_path: Path) -> None:
    from vllm.reasoning import ReasoningParserManager

    known = {*MARKS, *SAME_MARKS, *UNREAD, *NOT_OF_ONE_FORM} - {"<odd:think>"}
    assert known == set(ReasoningParserManager.list_registered())
    for name, text in UNREAD.items():
        assert tokenizer_of(tmp_path / "unread", template=_TURNS + text).template.unread_reasoning == name
    for name, marks in MARKS.items():
        assert tokenizer_of(tmp_path / name, *marks, template=_TURNS + marks[0]).template.unread_reasoning is None


@pytest.mark.parametrize(
    ("name", "field"), [("gptoss", "thinking"), ("gemma4_v5", "reasoning"), ("seed", ""), ("", "")]
)
def test_earlier_reasoning_is_kept_or_left_out_as_the_template_does(name: str, field: str, tmp_path: Path) -> None:
    template = _TURNS
    if name == "seed":  # keeps it, in the content
        template += "{# <seed:think> </seed:think> #}"
    elif name:
        template = resources.files("trl").joinpath(f"chat_templates/{name}.jinja").read_text()
    tokenizer = tokenizer_of(tmp_path, template, template=template)
    user = {"role": "user", "content": "3 + 4?"}
    said = {"role": "assistant", "content": "<think>five</think>six"}
    shown = {"gptoss": "six", "gemma4_v5": "six", "seed": "<seed:think>five</seed:think>six", "": said["content"]}[name]
    assert tokenizer.template.leaves_out_reasoning([user, said, user])[1] == bool(field)
    text = tokenizer.hf.decode(tokenizer.prompt([user, said, user]))
    assert shown in text and ("five" in text) == (not field)
    if field:
        split = {"role": "assistant", "content": "six", field: "five"}
        rendered = tokenizer.hf.apply_chat_template([user, split], tokenize=False)
        ids, mask = tokenizer.chat([user, said])
        assert tokenizer.hf.decode(ids) == rendered.rstrip("\n"), "a demonstration has the model's own form"
        assert tokenizer.answer(ids[mask.index(1) :]).replace("\n", "") == said["content"]
