"""The API, as the official client and broken ones use it, over a scripted policy."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import openai
import pytest

from rayrft.runtime.serving import key_digest
from tests.endpoint.scripted import CHAT, MAX_LENGTH, MODEL, TOOL, USER, Served, serve


async def streamed(served: Served, **options: Any) -> list[Any]:
    stream = await served.client.chat.completions.create(model=MODEL, messages=USER, stream=True, **options)
    return [chunk async for chunk in stream]


async def answered(served: Served, stream: bool, **options: Any) -> tuple[list[Any], Any]:
    """The choices of an answer, or of its chunks, and its usage."""
    if stream:
        chunks = await streamed(served, stream_options={"include_usage": True}, **options)
        return [choice for chunk in chunks for choice in chunk.choices], chunks[-1].usage
    answer = await served.client.chat.completions.create(model=MODEL, messages=USER, **options)
    return [*answer.choices], answer.usage


def parts(choices: list[Any]) -> list[Any]:
    return [choice.delta if hasattr(choice, "delta") else choice.message for choice in choices]


async def test_the_official_client_gets_answers_models_and_usage(served: Served) -> None:
    assert [model.id async for model in served.client.models.list()] == [MODEL]
    assert (await served.client.models.retrieve(MODEL)).id == MODEL
    answer = await served.client.chat.completions.create(model=MODEL, messages=USER, n=2, logprobs=True)
    assert [choice.message.content for choice in answer.choices] == ["hello"] * 2
    assert [choice.finish_reason for choice in answer.choices] == ["stop"] * 2
    logprobs = answer.choices[1].logprobs
    assert logprobs and logprobs.content and [entry.logprob for entry in logprobs.content] == [-0.5] * 6
    assert answer.usage and (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 12)
    short = await served.client.chat.completions.create(model=MODEL, messages=USER, max_completion_tokens=3)
    assert (short.choices[0].message.content, short.choices[0].finish_reason) == ("hel", "length")
    text = await served.client.completions.create(model=MODEL, prompt="hi", logprobs=1)
    assert (text.choices[0].text, text.object) == ("hello", "text_completion")
    ids = await served.client.completions.create(model=MODEL, prompt=[7, 8, 9])
    assert ids.usage and ids.usage.prompt_tokens == 3 and served.policy.requests[-1].prompt == [7, 8, 9]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_most_probable_tokens_are_shown_of_every_token(served: Served, stream: bool) -> None:
    options: dict[str, Any] = {"logprobs": True, "top_logprobs": 2}
    choices, _ = await answered(served, stream, **options)
    entries = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content or []]
    assert len(entries) == 6
    decode = served.policy.tokenizer.decode
    for entry in entries:
        assert [(each.token, each.logprob) for each in entry.top_logprobs] == [(decode([7]), -0.1), (decode([8]), -0.2)]
    with pytest.raises(openai.BadRequestError, match="top_logprobs"):
        await served.client.chat.completions.create(model=MODEL, messages=USER, top_logprobs=2)


async def test_prompts_in_a_list_are_echoed_with_their_logprobs_each_a_row_of_the_session(served: Served) -> None:
    hf = served.policy.tokenizer.hf
    first, second = hf.encode("hi you", add_special_tokens=False), hf.encode("hey", add_special_tokens=False)
    answer = await served.client.completions.create(
        model=MODEL, prompt=[first, second], n=2, echo=True, logprobs=2, max_tokens=1, user="s"
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == ["hi youh", "hi youh", "heyh", "heyh"]
    assert answer.usage and (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (9, 4)
    for choice, ids in zip(answer.choices, [first, first, second, second], strict=True):
        shown = choice.logprobs
        assert shown and shown.token_logprobs == [None, *[-0.5] * len(ids)] and shown.tokens
        assert "".join(shown.tokens) == choice.text and shown.text_offset == [*range(len(ids) + 1)]
        assert shown.top_logprobs and shown.top_logprobs[0] is None  # type: ignore[comparison-overlap]
        assert shown.top_logprobs[1] == {hf.decode([7]): -0.1, hf.decode([8]): -0.2, hf.decode([ids[1]]): -0.5}
    for stop in (None, ["z"]):
        nothing = await served.client.completions.create(
            model=MODEL, prompt="hi", echo=True, logprobs=0, max_tokens=0, stop=stop
        )
        assert nothing.choices[0].text == "hi" and nothing.choices[0].finish_reason == "length"
        assert nothing.choices[0].logprobs and nothing.choices[0].logprobs.token_logprobs == [None, -0.5]
    stream = await served.client.completions.create(model=MODEL, prompt=["a", "b"], echo=True, stream=True)
    texts = ["", ""]
    async for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == ["ahello", "bhello"]
    asked: Any = {"model": MODEL, "prompt": [first, second], "echo": True, "logprobs": 2, "max_tokens": 1}
    chunks = [chunk async for chunk in await served.client.completions.create(**asked, n=2, stream=True)]
    assert [each.choices[0].text for each in chunks[::2]] == [choice.text for choice in answer.choices]
    assert [each.choices[0].logprobs for each in chunks[::2]] == [choice.logprobs for choice in answer.choices]
    assert [each.choices[0].finish_reason for each in chunks] == [None, "length"] * 4
    await served.client.post("/feedback", cast_to=object, body={"id": "s", "reward": 1.0})
    assert len(served.book.sessions.take()[0][0].rows) == 4


async def test_a_list_with_a_bad_prompt_is_refused_and_none_of_its_calls_stays_open(served: Served) -> None:
    bad = {"too long": "x" * MAX_LENGTH, "empty": "", "huge id": [1 << 31], "unknown id": [1 << 30]}
    for name, prompt in bad.items():
        good: Any = [1, 2] if isinstance(prompt, list) else "hi"
        with pytest.raises(openai.BadRequestError):
            await served.client.completions.create(model=MODEL, prompt=[good, prompt, good], user=name)
    stats = served.book.sessions.stats()
    assert stats.open == 2 and stats.calls == {"context_length_exceeded": 3, "invalid_value": 3}
    assert not served.book.sessions._running


async def test_nothing_is_kept_of_who_does_not_want_it(served: Served) -> None:
    await served.client.chat.completions.create(model=MODEL, messages=USER, n=2, store=False)
    assert [chunk async for chunk in await served.client.responses.create(
        model=MODEL, input="hi", store=False, stream=True)]  # fmt: skip
    headers = {"Authorization": "Bearer private-x"}
    served.endpoint._key_digests = (*served.endpoint._key_digests, key_digest("private-x"))
    body = {"model": MODEL, "messages": USER}
    assert (await served.http.post("/v1/chat/completions", json=body, headers=headers)).status_code == 200
    sessions = served.book.sessions
    assert (sessions.stats().open, sessions.take()) == (0, ([], {"opted_out": 4}))
    kept = await served.client.chat.completions.create(model=MODEL, messages=USER, user="Ann")
    other = await served.client.chat.completions.create(model=MODEL, messages=USER)
    gone = await served.http.delete(f"/v1/chat/completions/{kept.id}")
    assert gone.json() == {"id": kept.id, "deleted": True, "rows": 1, "rows_in_training": 0}
    assert (await served.http.delete("/v1/responses/resp_1")).status_code == 404
    assert (sessions.stats().open, sessions.take()[1]) == (1, {"forgotten": 1})
    await served.client.post("/feedback", cast_to=object, body={"id": other.id, "reward": 1.0})


async def test_a_session_may_be_named_by_the_base_url(served: Served) -> None:
    client = served.client.with_options(base_url=f"{served.url}/sessions/s-7/v1")
    assert [model.id async for model in client.models.list()] == [MODEL]
    answer = await client.chat.completions.create(model=MODEL, messages=USER, extra_headers={"X-Session-Id": "no"})
    rated: Any = await client.post("/feedback", cast_to=object, body={"id": answer.id, "reward": 1.0})
    assert rated["session_id"] == "s-7" and len(served.book.sessions.take()[0]) == 1


async def test_streamed_text_is_the_whole_answer_and_usage_comes_last(served: Served) -> None:
    chunks = await streamed(served, n=2, logprobs=True, stream_options={"include_usage": True})
    for index in range(2):
        choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert "".join(choice.delta.content or "" for choice in choices) == "hello"
        assert choices[0].delta.role == "assistant" and choices[-1].finish_reason == "stop"
        entries = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content or []]
        assert len(entries) == 6
        assert len(choices) > 4  # as they are sampled, not at the end
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 12
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("thought", ["", "<think>two, so two</think>"])
async def test_a_stop_string_ends_the_answer_at_the_engine_unseen(tiny_model: Path, stream: bool, thought: str) -> None:
    async with serve(tiny_model, lambda prompt: f"{thought}one two three four five six") as served:
        choices, usage = await answered(served, stream, stop=["o t", "never"])
        text = "".join(part.content or "" for part in parts(choices))
        reasoning = "".join(getattr(part, "reasoning_content", "") for part in parts(choices))
        assert choices[-1].finish_reason == "stop" and usage.completion_tokens == len(f"{thought}one two t")
        assert (text, reasoning) == ("one tw", thought.removeprefix("<think>").removesuffix("</think>"))
        assert len(served.policy.sampled[0].token_ids) < len(thought) + 15  # of 28: it was interrupted


@pytest.mark.parametrize("keeps", [True, False])
async def test_a_text_continues_what_was_sampled_only_with_its_stop_string(tiny_model: Path, keeps: bool) -> None:
    async with serve(tiny_model, lambda prompt: "look it up\nSeen: no") as served:
        options: dict[str, Any] = {"model": MODEL, "user": "s", "stop": ["\nSeen:"]}
        first = await served.client.completions.create(prompt="ask. ", **options)
        assert first.choices[0].text == "look it up"
        following = f"ask. look it up{chr(10) + 'Seen:' if keeps else ''} 42. "
        await served.client.completions.create(prompt=following, **options)
        assert served.prompts[-1] == following and len(served.rows("s")) == (1 if keeps else 2)


async def test_a_second_reward_is_refused_once(served: Served) -> None:
    answer = await served.client.chat.completions.create(**CHAT)
    client = served.client.with_options(max_retries=2)
    for refused in (False, True):
        with pytest.raises(openai.ConflictError) if refused else contextlib.nullcontext():
            await client.post("/feedback", cast_to=object, body={"id": answer.id, "reward": 1.0})
    assert served.endpoint.outcomes == {"200": 2, "409 already_rewarded": 1}


async def test_answers_in_json_and_penalties_are_sampled_as_asked_and_masked_in_training(tiny_model: Path) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    asked: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"response_format": form}, {"json_schema": json.dumps(schema)}),
        ({"response_format": {"type": "json_object"}}, {"json_schema": '{"type": "object"}'}),
        ({"presence_penalty": 0.5, "extra_body": {"min_p": 0.1}}, {"presence_penalty": 0.5, "min_p": 0.1}),
        ({"frequency_penalty": -1}, {"frequency_penalty": -1.0}),
        ({"logit_bias": {"7": -100}}, {"logit_bias": ((7, -100.0),)}),
        ({"extra_body": {"min_tokens": 3}, "verbosity": "low"}, {"min_tokens": 3}),
        ({"extra_body": {"ignore_eos": True, "stop_token_ids": [7]}}, {"ignore_eos": True, "stop_token_ids": (7,)}),
        ({"extra_body": {"bad_words": ["no"]}}, {"bad_words": ("no",)}),
        ({"extra_body": {"allowed_token_ids": [7, 8]}}, {"allowed_token_ids": (7, 8)}),
    ]
    for policy in ("untrained", "refuse", "ignore"):
        async with serve(tiny_model, off_policy=policy) as served:
            for options, sampled in asked:
                call = served.client.chat.completions.create(model=MODEL, messages=USER, user="s", **options)
                if policy == "refuse":
                    with pytest.raises(openai.BadRequestError):
                        await call
                    continue
                await call
                sampling = served.policy.requests[-1].sampling
                kept = policy == "untrained" or "response_format" in options
                assert all((getattr(sampling, name) == value) == kept for name, value in sampled.items()), options
                if kept:
                    await served.client.post("/feedback", cast_to=object, body={"id": "s", "reward": 1.0})
                    assert served.book.sessions.take()[1] == {"not_trained": 1}


@pytest.mark.parametrize("stream", [False, True])
async def test_calls_of_tools_are_parsed_and_not_shown_as_text(tiny_model: Path, stream: bool) -> None:
    said = 'so <tool_call>{"name":"add","arguments":{"a":1}}</tool_call>'
    async with serve(tiny_model, lambda prompt: said, max_length=600) as served:
        choices, _ = await answered(served, stream, tools=[TOOL])
        assert "".join(part.content or "" for part in parts(choices)) == "so "
        [call] = [call for part in parts(choices) for call in part.tool_calls or []]
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})
        assert choices[-1].finish_reason == "tool_calls"
        plain = await served.client.chat.completions.create(model=MODEL, messages=USER)
        assert plain.choices[0].message.content == said and plain.choices[0].message.tool_calls is None


@pytest.mark.parametrize("mode", ["auto", "required"])
@pytest.mark.parametrize("api", ["chat", "responses"])
async def test_of_the_allowed_tools_alone_one_is_called(api: str, mode: str, tiny_model: Path) -> None:
    other = {"type": "function", "function": {"name": "subtract", "parameters": {"type": "object"}}}
    allowed: dict[str, Any] = {"mode": mode, "tools": [{"type": "function", "function": {"name": "add"}}]}
    choice: dict[str, Any] = {"type": "allowed_tools", "allowed_tools": allowed}
    form: Any = {"response_format": {"type": "json_object"}}
    said = '{"name": "add", "arguments": {"a": 1}}'
    said = said if mode == "required" else f"<tool_call>{said}</tool_call>"
    async with serve(tiny_model, lambda prompt: said, max_length=600) as served:
        create: Any = served.client.chat.completions.create
        asked: dict[str, Any] = {"messages": USER, "tools": [TOOL, other], "tool_choice": choice, **form}
        if api == "responses":
            choice = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": "add"}]}
            tools = [{"type": "function", **each["function"]} for each in (TOOL, other)]
            asked = {"input": "hi", "tools": tools, "tool_choice": choice, "text": {"format": form["response_format"]}}
            asked |= {"truncation": "auto", "max_tool_calls": 3}
            create = served.client.responses.create
        answer = (await create(model=MODEL, **asked)).model_dump()
        assert "add" in json.dumps(answer.get("output") or answer["choices"][0]["message"]["tool_calls"])
        [request], [shown] = served.policy.requests, served.prompts
        assert "add" in shown and "subtract" not in shown
        assert ('"const": "add"' in request.sampling.json_schema) == (mode == "required"), "the tool's schema wins"
        for wrong in ({**choice, "allowed_tools": {"tools": [other], "mode": "any"}}, {"type": "allowed_tools"}):
            with pytest.raises(openai.BadRequestError, match="tool_choice"):
                await create(model=MODEL, **{**asked, "tool_choice": wrong})


async def test_a_template_that_knows_no_tools_is_shown_them_and_their_results_as_text(tiny_model: Path) -> None:
    said = '<tool_call>{"name":"add","arguments":{"a":1}}</tool_call>'
    async with serve(tiny_model, lambda prompt: said, max_length=600) as served:
        ask: Any = {"model": MODEL, "tools": [TOOL], "extra_headers": {"X-Session-Id": "s"}}
        first = await served.client.chat.completions.create(messages=USER, **ask)
        called = first.choices[0].message
        assert called.tool_calls
        result = {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": "three"}
        messages: Any = [*USER, called.model_dump(exclude_none=True), result]
        await served.client.chat.completions.create(messages=messages, **ask)
        assert '"name": "add"' in served.prompts[0] and "three" in served.prompts[1]
        answer = served.policy.sampled[0].token_ids
        assert tuple(served.policy.requests[1].prompt[len(served.policy.requests[0].prompt) :][: len(answer)]) == answer
        [row] = served.rows("s")
        assert int(row.action_mask.sum()) == 2 * len(answer)


async def test_a_call_that_cannot_be_read_is_shown_as_it_is(tiny_model: Path) -> None:
    async with serve(tiny_model, lambda prompt: "<tool_call>{oh no", max_length=600) as served:
        chunks = await streamed(served, tools=[TOOL])
        assert "".join(each.delta.content or "" for chunk in chunks for each in chunk.choices) == "<tool_call>{oh no"


RAISING = """
from rayrft.explorer.tools.call_formats import HermesCalls, register_call_format

@register_call_format("raising")
class Raising(HermesCalls):
    async def read_answer(self, answer, tools):
        raise KeyError("arguments")
"""


async def test_an_answer_on_which_a_format_of_ones_own_raises_is_text_and_counted(
    tiny_model: Path, tmp_path: Path
) -> None:
    (plugin := tmp_path / "raising.py").write_text(RAISING)
    settings: dict[str, Any] = {"max_length": 600, "tool_calls": "raising", "plugins": (plugin,)}
    async with serve(tiny_model, lambda prompt: "<tool_call>", **settings) as served:
        answer = await served.client.chat.completions.create(model=MODEL, messages=USER, tools=[TOOL])
        message = answer.choices[0].message
        assert message.content == "<tool_call>" and not message.tool_calls
        assert (await served.http.get("/v1/stats")).json()["malformed_calls"] == 1


@pytest.mark.parametrize(
    ("off_policy", "status", "temperature", "trained"),
    [("untrained", 200, 0.5, False), ("ignore", 200, 1.0, True), ("refuse", 400, None, None)],
)
async def test_sampling_of_ones_own_is_masked_ignored_or_refused(
    tiny_model: Path, off_policy: str, status: int, temperature: float | None, trained: bool | None
) -> None:
    async with serve(tiny_model, off_policy=off_policy) as served:
        response = await served.http.post("/v1/chat/completions", json={**CHAT, "temperature": 0.5, "top_p": 1.0})
        assert response.status_code == status
        if temperature is None:
            assert response.json()["error"]["param"] == "temperature"
            return
        assert served.policy.requests[0].sampling.temperature == temperature
        served.book.sessions.feedback(response.json()["id"], 1.0, {}, 0.0)
        groups, dropped = served.book.sessions.take()
        assert (len(groups), dict(dropped)) == ((1, {}) if trained else (0, {"not_trained": 1}))


async def test_an_answer_is_as_long_as_the_context_allows(tiny_model: Path) -> None:
    async with serve(tiny_model, lambda prompt: "y" * 500) as served:
        messages: list[Any] = [{"role": "user", "content": "x" * 100}]
        answer = await served.client.chat.completions.create(model=MODEL, messages=messages, max_tokens=64)
        assert answer.usage and answer.usage.total_tokens == MAX_LENGTH
        assert answer.choices[0].finish_reason == "length"
