"""Reasoning in a session: shown apart, sent back or not, and kept in later calls or left out as the template does."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from rayrft.trainer.tiny import make_tokenizer
from tests.endpoint.scripted import MODEL, serve

USER: list[Any] = [{"role": "user", "content": "hi"}]


async def test_options_of_the_template_are_the_requests_own_and_a_session_goes_by_them(tiny_model: Path) -> None:
    shown = "{% if quiet is defined and quiet %}!{% endif %}"
    async with serve(tiny_model, lambda prompt: "5</think>6") as served:
        template = served.policy.tokenizer.hf.chat_template
        served.policy.tokenizer.hf.chat_template = shown + template + "{% if not quiet %}<think>{% endif %}"
        chats = [*USER, {"role": "assistant", "content": "<think>5</think>6"}, {"role": "user", "content": "more"}]
        texts = []
        for messages, quiet in [(USER, False), (chats, False), (chats, True)]:
            body = {"model": MODEL, "user": "s", "messages": messages, "chat_template_kwargs": {"quiet": quiet}}
            answer = (await served.http.post("/v1/chat/completions", json=body)).json()
            texts.append(answer["choices"][0]["message"]["content"])
        assert texts == ["6", "6", "5</think>6"]
        prompts = served.prompts
        assert prompts[0] == "<|user|>hi<|assistant|><think>" and prompts[1].startswith(prompts[0] + "5</think>6")
        assert prompts[2] == "!<|user|>hi<|assistant|><think>5</think>6<|eos|><|user|>more<|assistant|>"


@pytest.mark.parametrize(
    ("template", "effort", "options"),
    [
        ("qwen3", "none", {"enable_thinking": False}),
        ("qwen3", "low", {"enable_thinking": True}),
        ("gptoss", "high", {"reasoning_effort": "high"}),
        ("qwen2_5", "none", {}),
        ("qwen2_5", "low", None),
        ("deepseek_r1_distill", "none", None),
    ],
)
async def test_the_effort_of_reasoning_is_an_option_of_the_template_or_refused(
    template: str, effort: str, options: dict[str, Any] | None, tiny_model: Path
) -> None:
    text = resources.files("trl").joinpath(f"chat_templates/{template}.jinja").read_text()
    asked = [("chat/completions", {"messages": USER, "reasoning_effort": effort})]
    asked.append(("responses", {"input": "hi", "reasoning": {"effort": effort, "summary": "auto"}}))
    if effort == "none":
        asked.append(("messages", {"messages": USER, "max_tokens": 9, "thinking": {"type": "disabled"}}))
    async with serve(tiny_model, max_length=2000) as served:
        served.policy.tokenizer.hf.chat_template = text
        for route, body in asked:
            response = await served.http.post(f"/v1/{route}", json={"model": MODEL, **body})
            if options is None:
                assert response.status_code == 400 and "effort of reasoning" in response.text, route
            else:
                prompt = served.policy.tokenizer.prompt(USER, options=options)
                assert served.policy.requests[-1].prompt == prompt, route


@pytest.mark.parametrize(
    "echo", [{"content": "6"}, {"content": "<think>5</think>6"}, {"content": "6", "reasoning_content": "5"}]
)
async def test_a_client_may_send_reasoning_back_in_its_field_in_the_content_or_not(
    echo: dict[str, str], tiny_model: Path
) -> None:
    async with serve(tiny_model, lambda prompt: "<think>5</think>6") as served:
        history = [*USER, {"role": "assistant", **echo}, {"role": "user", "content": "more"}]
        for messages in (USER, history):
            body = {"model": MODEL, "user": "s", "messages": messages}
            said = (await served.http.post("/v1/chat/completions", json=body)).json()["choices"][0]["message"]
            assert (said["content"], said["reasoning_content"]) == ("6", "5")
        [row] = served.rows("s")
        before = [*served.policy.requests[0].prompt, *served.policy.sampled[0].token_ids]
        assert row.token_ids[: len(before)].tolist() == before, "its tokens stay as they were sampled"


LOOK: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CALL = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'


@pytest.mark.parametrize("sent_back", [True, False])
@pytest.mark.parametrize(("history", "rows"), [("sampled", 1), ("template", 2)])
async def test_a_session_is_one_row_or_one_for_each_turn_of_the_user_whose_reasoning_the_template_leaves_out(
    history: str, rows: int, sent_back: bool, tiny_model: Path
) -> None:
    """The template of Qwen3, which keeps the reasoning of a loop of tools until the user speaks again."""
    said = iter([f"<think>first</think>{CALL}", "<think>second</think>blue", "<think>third</think>no"])
    template = resources.files("trl").joinpath("chat_templates/qwen3.jinja").read_text()
    async with serve(tiny_model, lambda prompt: next(said), max_length=900, history=history) as served:
        served.policy.tokenizer.hf.chat_template = template
        messages = list(USER)

        async def answer(*further: dict[str, Any]) -> Any:
            messages.extend(further)
            body = {"model": MODEL, "user": "s", "messages": messages, "tools": [LOOK]}
            message = (await served.http.post("/v1/chat/completions", json=body)).json()["choices"][0]["message"]
            if not sent_back:
                message.pop("reasoning_content")
            messages.append(message)
            return message

        [call] = (await answer())["tool_calls"]
        await answer({"role": "tool", "tool_call_id": call["id"], "content": "blue"})
        assert (await answer({"role": "user", "content": "Sure?"}))["content"] == "no"
        one, two, _ = served.policy.requests
        assert two.prompt[: len(one.prompt)] == one.prompt
        shown = served.prompts[2]
        assert ("first" in shown, "second" in shown) == (rows == 1, rows == 1)
        if rows == 2:
            plain = [{**each, "content": each["content"] or "", "reasoning_content": ""} for each in messages[:-1]]
            rendered = served.policy.tokenizer.hf.apply_chat_template(
                plain, tools=[LOOK], add_generation_prompt=True, tokenize=False
            )
            assert shown == rendered
        found = served.rows("s")
        assert len(found) == rows
        trained = sum(int(row.action_mask.sum()) for row in found)
        assert trained == sum(len(each.token_ids) for each in served.policy.sampled), "each answer once"


ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
LOOKS = "<|start|>assistant<|channel|>commentary to=functions.look <|constrain|>json<|message|>{}"


async def test_the_channels_of_harmony_are_reasoning_a_call_and_the_answer(tmp_path: Path) -> None:
    template = resources.files("trl").joinpath("chat_templates/gptoss.jinja").read_text()
    marks = sorted(set(re.findall(r"<\|[a-z]+\|>", template)))
    make_tokenizer([], [], special=marks, template=template).save_pretrained(tmp_path)
    function = {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}}
    tools: Any = [{"type": "function", "function": function}]
    said = iter([f"{ANALYSIS}first<|end|>{LOOKS}", f"{ANALYSIS}second<|end|><|start|>assistant{FINAL}blue"])
    async with serve(tmp_path, lambda prompt: next(said), max_length=2000) as served:
        body = {"model": MODEL, "user": "s", "messages": USER, "tools": tools, "max_tokens": 200}
        message = (await served.http.post("/v1/chat/completions", json=body)).json()["choices"][0]["message"]
        [call] = message["tool_calls"]
        assert (message["reasoning_content"], call["function"]["name"]) == ("first", "look") and not message["content"]
        result = {"role": "tool", "tool_call_id": call["id"], "content": "blue"}
        stream = await served.client.chat.completions.create(
            model=MODEL, user="s", messages=[*USER, message, result], tools=tools, stream=True, max_tokens=200
        )
        pieces = [chunk.choices[0].delta async for chunk in stream if chunk.choices]
        assert "".join(piece.content or "" for piece in pieces) == "blue"
        assert "".join(getattr(piece, "reasoning_content", None) or "" for piece in pieces) == "second"
        one, two = served.policy.requests
        before = [*one.prompt, *served.policy.sampled[0].token_ids]
        assert two.prompt[: len(before)] == before, "its tokens stay as they were sampled"
        shown = served.policy.tokenizer.hf.decode(two.prompt[len(before) :])
        assert shown.endswith(
            '<|start|>functions.look to=assistant<|channel|>commentary<|message|>"blue"<|end|><|start|>assistant'
        )
