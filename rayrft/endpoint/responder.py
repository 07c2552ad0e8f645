"""From a request to its answers: check it, sample by the engines, and record it in its session."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import fields, replace
from typing import Any, Protocol, TypeVar

from fastapi import Request

from rayrft.data.reasoning import ReasoningSplit
from rayrft.data.tokenizer import ChatTokenizer, fills
from rayrft.endpoint.anthropic import MessagesReply, MessagesRequest
from rayrft.endpoint.decoding import AnswerText, decode_message, truncate_answer
from rayrft.endpoint.protocol import ChatMessage, ChatRequest, CompletionRequest, Prompt, Sampled, without_marks
from rayrft.endpoint.recording import Call, Choice, Conversation, OpenCall, canonical_messages
from rayrft.endpoint.replies import CheckedRequest, ChoicesReply, DecodedAnswer, ReplyForm, TextPiece
from rayrft.endpoint.responses import ResponseReply, ResponsesRequest
from rayrft.endpoint.sessions import SessionStats
from rayrft.endpoint.settings import EndpointSettings
from rayrft.errors import ActorUnreachable, DataError, ModelError
from rayrft.explorer.engines import exchange
from rayrft.explorer.engines.exchange import Chunk, Completion, Sampling, Session, TokenCallback
from rayrft.explorer.tools.call_formats import CallFormat, HermesCalls, JsonCalls, instructed
from rayrft.explorer.tools.vllm_parsers import open_call_format
from rayrft.registry import load_plugins
from rayrft.runtime.handle import once
from rayrft.runtime.serving.http import ApiError, api_error, client_gone, unless_gone
from rayrft.runtime.waits import cancel

R = TypeVar("R")
_SAME = "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens", "ignore_eos"
"""Parameters of requests that are those of `Sampling`."""


class StreamingEngines(Protocol):
    """Engines that stream tokens: see `EngineClient`."""

    async def generate(
        self, request: exchange.Request, sessions: Sequence[Session] = (), on_tokens: TokenCallback | None = None
    ) -> list[Completion]: ...


class SessionStore(Protocol):
    """The record of every call: see `SessionKeeper`."""

    async def begin(self, session: str, task: str | None, conversation: Conversation) -> OpenCall: ...

    async def answered(self, begun: OpenCall, call: Call) -> None: ...

    async def failed(self, begun: OpenCall, reason: str) -> None: ...

    async def opted_out(self, rows: int) -> None: ...

    async def forget(self, name: str) -> tuple[int, int]: ...

    async def feedback(self, name: str, reward: float, components: dict[str, float]) -> str: ...

    async def stats(self) -> SessionStats: ...


class Responder:
    """Answers requests by engines; without ``sessions``, calls are not recorded."""

    def __init__(
        self,
        engines: StreamingEngines,
        sessions: SessionStore | None,
        tokenizer: ChatTokenizer,
        settings: EndpointSettings,
    ) -> None:
        load_plugins(settings.plugins)
        self.engines = engines
        self.sessions = sessions
        self._tokenizer = tokenizer
        self.settings = settings
        self._config = settings.config
        self.malformed_calls = 0
        """Number of calls in answers that could not be read: such an answer is text."""

    async def begin(
        self, body: Sampled, response: str, session: str, task: str | None, *, record: bool = True
    ) -> list[CheckedRequest]:
        """Check a request; with ``record``, begin a call in its session for each of its prompts."""
        body = self._with_effort(body) if isinstance(body, ChatRequest) else body
        prompts: list[Prompt | None] = [*body.prompts] if isinstance(body, CompletionRequest) else [None]
        named = (session, task) if record else None
        checking = [
            asyncio.ensure_future(self._checked(body, prompt, response, named, number * body.n))
            for number, prompt in enumerate(prompts)
        ]
        try:
            return await asyncio.gather(*checking)
        except BaseException as error:
            await cancel(*checking)  # those that failed, or were cancelled, have ended their calls
            begun = [each.result() for each in checking if not each.cancelled() and not each.exception()]
            await self._failed(begun, error)
            raise

    async def _checked(
        self, body: Sampled, prompt: Prompt | None, response: str, named: tuple[str, str | None] | None, first: int
    ) -> CheckedRequest:
        """Check one prompt of a request, or its messages; begin its call in the session that is ``named``."""
        sampling, trained = self._sampling(body)
        if isinstance(body, ChatRequest):
            options = body.chat_template_kwargs
            head: dict[str, Any] = {"tools": list(body.shown_tools), **({"options": options} if options else {})}
            conversation: Conversation = canonical_messages([head, *self._plain(body)])
            turns = tuple(each.for_display() for each in body.messages)
        else:
            assert prompt is not None
            conversation = prompt if isinstance(prompt, str) else tuple(prompt)
            text = prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt)
            turns = ({"role": "user", "content": text},)
        begun = await self._begun(*named, conversation) if named is not None else None
        images = body.images if isinstance(body, ChatRequest) else ()
        ask = CheckedRequest(body, response, begun, conversation, turns, [], sampling, trained, None, first, images)

        async def checked() -> CheckedRequest:
            known: CallFormat = HermesCalls()
            form: CallFormat | None = None
            if isinstance(body, ChatRequest):
                # A template without tools shows earlier calls as the model writes them, too.
                bare = not self._tokenizer.template.takes_tools and any(each.tool_calls for each in body.messages)
                known = await self._call_format() if body.shown_tools or bare else known
                form = JsonCalls() if body.must_call else known if body.shown_tools else None
            size = self.settings.max_length
            if images:
                await self._check_images()
            full = fills((turn["content"] for turn in turns), size)
            ids, new_turns = ([], turns) if full else self._tokenise(ask, form or known)
            room = 0 if full else size - len(ids)
            if room <= 0:
                problem = f"This model's maximum context length is {size} tokens. However, your prompt resulted in "
                problem += f"{'more' if full else f'{len(ids)} tokens'}, which leaves no room for an answer."
                param = "messages" if isinstance(body, ChatRequest) else "prompt"
                raise ApiError(400, problem, code="context_length_exceeded", param=param)
            most = self.settings.sampling.max_tokens if body.limit is None else max(1, body.limit)
            limit = min(most, room)
            return replace(ask, prompt=ids, turns=new_turns, sampling=replace(sampling, max_tokens=limit), form=form)

        return await self._or_failed([ask], checked())

    async def whole(self, asks: list[CheckedRequest], request: Request) -> dict[str, Any]:
        """Return the body of the response; stop if the client of ``request`` goes away."""
        answers = await self._or_failed(asks, unless_gone(request, self._answers(asks, None)))
        return self._reply(asks).whole(answers)

    async def events(self, asks: list[CheckedRequest]) -> AsyncIterator[str]:
        """Yield the events of a streamed response; the last ones once the call is recorded."""
        pieces: asyncio.Queue[TextPiece | None] = asyncio.Queue()
        show = None if asks[0].body.scored else pieces.put_nowait
        answering = asyncio.ensure_future(self._or_failed(asks, self._answers(asks, show)))
        answering.add_done_callback(lambda _: pieces.put_nowait(None))
        reply = self._reply(asks)
        try:
            for event in reply.begin():
                yield event
            while (piece := await pieces.get()) is not None:
                for event in reply.piece(piece):
                    yield event
            answers = await answering
            for answer in answers:
                for event in reply.end(answer):
                    yield event
            for event in reply.done(answers):
                yield event
        except Exception as error:  # whatever went wrong is the end of this stream
            problem = api_error(error)
            yield reply.failed(problem)
            raise problem from None
        finally:
            await cancel(answering)

    def _with_effort(self, body: ChatRequest) -> ChatRequest:
        """Return a request whose effort of reasoning is an option of the chat template. Raises ApiError if it has no
        such option, unless no reasoning is asked for and the template shows none."""
        effort, template = body.reasoning_effort, self._tokenizer.template
        choices = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
        options = {name: value for name, value in choices.items() if effort and template.has_option(name)}
        if effort and not options and (effort != "none" or template.shows_reasoning):
            problem = f"The effort of reasoning is {effort!r}, and the chat template has no option for it."
            raise ApiError(400, problem, code="unsupported_parameter", param="reasoning_effort")
        return body.model_copy(update={"chat_template_kwargs": {**options, **body.chat_template_kwargs}})

    def _plain(self, body: ChatRequest) -> list[dict[str, Any]]:
        """Return the messages in the form that is compared; an answer without its reasoning
        differs from the sampled one, if the history is that of the template. Raises DataError."""
        messages = [each.plain() for each in body.messages]
        if self._config.history == "template":
            tools, bare = body.shown_tools, not self._tokenizer.template.takes_tools
            shown = [each.for_bare_template(HermesCalls()) if bare else each.for_template() for each in body.messages]
            cut = self._tokenizer.template.leaves_out_reasoning(shown, () if bare else tools, body.chat_template_kwargs)
            messages = [{**each, "cut": True} if is_cut else each for each, is_cut in zip(messages, cut, strict=True)]
        return messages

    async def _check_images(self) -> None:
        """Raise ApiError if the model takes no images."""
        try:
            await asyncio.to_thread(lambda: self._tokenizer.images)
        except ModelError as error:
            raise ApiError(400, f"{error.problem}.", code="unsupported_value", param="messages") from None

    @once
    async def _call_format(self) -> CallFormat:
        """Return the format of the model's calls; the first request waits until it is known."""
        return await open_call_format(self._config.tool_calls, self._tokenizer, "serve.tool_calls")

    async def _begun(self, session: str, task: str | None, conversation: Conversation) -> OpenCall | None:
        """Begin a call in its session, if sessions are recorded."""
        if self.sessions is None:
            return None
        beginning = asyncio.ensure_future(self.sessions.begin(session, task, conversation))
        try:
            return await asyncio.shield(beginning)
        except asyncio.CancelledError:  # the call may have begun, and must be ended here
            await self.sessions.failed(await beginning, client_gone().code)
            raise

    def _sampling(self, body: Sampled) -> tuple[Sampling, bool]:
        """Return the sampling of a request, and whether the run trains on it."""
        rules = self.settings.sampling
        run = Sampling(rules.temperature, rules.max_tokens, self._tokenizer.stop_ids, body.seed, rules.repetition)
        asked = replace(
            run,
            temperature=run.temperature if body.temperature is None else body.temperature,
            top_p=body.top_p or 1.0,
            top_k=max(0, body.top_k or 0),
            stop_token_ids=(*(() if body.ignore_eos else run.stop_token_ids), *body.stop_token_ids),
            bad_words=tuple(body.bad_words),
            allowed_token_ids=tuple(body.allowed_token_ids),
            logit_bias=tuple(sorted(body.logit_bias.items())),
            **{name: getattr(body, name) for name in _SAME},
            json_schema=json.dumps(body.json_schema) if body.json_schema is not None else "",
        )
        changed = [each.name for each in fields(Sampling) if getattr(asked, each.name) != getattr(run, each.name)]
        if not changed or self._config.off_policy == "ignore":
            # What an application parses must have its form, and is then not sampled as the run does.
            return replace(run, json_schema=asked.json_schema), not asked.json_schema
        if self._config.off_policy == "refuse":
            problem = f"{changed[0]}: this endpoint samples at temperature {run.temperature:g} alone, as its run does."
            raise ApiError(400, problem, code="unsupported_value", param=changed[0])
        return asked, False

    def _tokenise(self, ask: CheckedRequest, form: CallFormat) -> tuple[list[int], tuple[dict[str, str], ...]]:
        """Return the prompt's token ids, and the turns after its prefix. Raises DataError."""
        body, tokenizer, prefix = ask.body, self._tokenizer, ask.prefix
        known = prefix.length if prefix is not None else 0
        if isinstance(body, ChatRequest):
            tools, bare = body.shown_tools, not tokenizer.template.takes_tools
            options = body.chat_template_kwargs
            messages = [each.for_bare_template(form) if bare else each.for_template() for each in body.messages]
            for each, message in zip(body.messages, messages, strict=True):
                if each.role == "tool":
                    message["content"] = tokenizer.defuse(message["content"])
                if ask.images and not each.images:
                    message["content"] = without_marks(message["content"])
            # The first entry of the conversation stands for the tools.
            old, new = (messages[: known - 1], messages[known - 1 :]) if prefix is not None else (messages, [])
            if tools and bare:
                old, tools = instructed(old, tools, form.instructions), ()
            if prefix is None:
                return tokenizer.prompt(old, ask.images, tools, options), ask.turns
            shown = tuple(image for each in body.messages[known - 1 :] for image in each.images)
            observed = tokenizer.observation(old, new, shown, tools, options, last=prefix.token_ids[-1])
            ids = [*prefix.token_ids, *observed]
            if ask.images and ids.count(tokenizer.images.token_id) != sum(map(tokenizer.images.tokens, ask.images)):
                raise DataError("an answer before it has tokens that stand for images", field="messages")
            return ids, ask.turns[known - 1 :]
        rest: Any = ask.conversation[known:]
        text = rest if isinstance(rest, str) else tokenizer.decode(list(rest))
        ids = tokenizer.tokens(rest, begins=prefix is None) if isinstance(rest, str) else rest
        return [*(prefix.token_ids if prefix is not None else ()), *ids], ({"role": "user", "content": text},)

    async def _answers(
        self, asks: list[CheckedRequest], show: Callable[[TextPiece], None] | None
    ) -> list[DecodedAnswer]:
        """Sample the answers to all prompts, and record them."""
        async with asyncio.timeout(self._config.deadline_s), asyncio.TaskGroup() as group:
            answering = [group.create_task(self._answers_to(ask, show)) for ask in asks]
        sampled = [each.result() for each in answering]
        await asyncio.gather(*(self._record(ask, *each) for ask, each in zip(asks, sampled, strict=True)))
        return [answer for answers, _ in sampled for answer in answers]

    async def _answers_to(
        self, ask: CheckedRequest, show: Callable[[TextPiece], None] | None
    ) -> tuple[list[DecodedAnswer], str | None]:
        """Sample the answers to one prompt: in one request, or in one for each if they are streamed or have stop
        strings. Return also the engine of the first."""
        sessions = [Session(ask.prefix.engine if ask.prefix is not None else None) for _ in range(ask.body.n)]
        if show is None and not (ask.body.stops and ask.body.limit != 0):
            completions = await self.engines.generate(_request(ask, ask.body.n), sessions)
            answers = [await self._finished(ask, index, each, None) for index, each in enumerate(completions)]
        else:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._stream(ask, *each, show)) for each in enumerate(sessions)]
            answers = [task.result() for task in tasks]
        return answers, sessions[0].engine

    async def _stream(
        self, ask: CheckedRequest, index: int, session: Session, show: Callable[[TextPiece], None] | None
    ) -> DecodedAnswer:
        """Sample one answer up to a stop string."""
        held = ask.form.begins if ask.form is not None else None
        text = AnswerText(self._tokenizer, ask.body.stops, held, self._opening(ask))
        split = ReasoningSplit() if self._splits(ask) else None

        def on_tokens(chunk: Chunk) -> None:
            if text.stopped_at is not None:
                return
            before = text.tokens
            if text.add(chunk.token_ids):
                session.interrupt()
            if show is not None and ((piece := text.show()) or ask.body.alternatives is not None):
                reasoning, piece = split.add(piece) if split is not None else ("", piece)
                show(TextPiece(ask.first + index, piece, chunk.cut(0, text.tokens - before), reasoning))

        seed = None if ask.sampling.seed is None else ask.sampling.seed + index
        request = replace(_request(ask, 1), sampling=replace(ask.sampling, seed=seed), stream=True)
        [completion] = await self.engines.generate(request, [session], on_tokens)
        return await self._finished(ask, index, completion, text, split)

    async def _finished(
        self,
        ask: CheckedRequest,
        index: int,
        completion: Completion,
        text: AnswerText | None,
        split: ReasoningSplit | None = None,
    ) -> DecodedAnswer:
        """Return a complete answer; ``text`` has the tokens that were streamed, ``split`` what was shown of them."""
        index += ask.first
        if ask.body.limit == 0:
            completion = truncate_answer(completion, 0, "length")
        streamed = text.tokens if text is not None else 0
        if text is None:
            whole = self._opening(ask) + self._tokenizer.decode(list(completion.token_ids))
            tail = whole
        else:
            text.add(completion.token_ids[streamed:])
            completion = truncate_answer(completion, text.stopped_at)
            tail, whole = text.end(), text.text
        tools = ask.body.shown_tools if isinstance(ask.body, ChatRequest) else ()
        found = await decode_message(whole, ask.form, tools, split=self._splits(ask))
        self.malformed_calls += found.malformed
        if isinstance(ask.body, ChatRequest) and not ask.body.parallel_tool_calls:
            found = replace(found, tool_calls=found.tool_calls[:1])
        shown, reasoning = len(whole) - len(tail), found.reasoning
        if split is not None:
            shown, reasoning = len(split.content), reasoning[len(split.reasoning) :]
        tokens = Chunk(completion.token_ids, completion.logprobs, alternatives=completion.alternatives)
        piece = TextPiece(index, found.content[shown:], tokens.cut(streamed), reasoning)
        return DecodedAnswer(completion, whole, found, piece, text.stopped_by if text is not None else None)

    def _splits(self, ask: CheckedRequest) -> bool:
        return self._config.reasoning == "split" and isinstance(ask.body, ChatRequest)

    def _opening(self, ask: CheckedRequest) -> str:
        body = ask.body
        return self._tokenizer.template.opening(body.chat_template_kwargs) if isinstance(body, ChatRequest) else ""

    async def _record(self, ask: CheckedRequest, answers: list[DecodedAnswer], engine: str | None) -> None:
        if self.sessions is None:
            return
        if ask.begun is None:
            return await self.sessions.opted_out(len(answers))
        choices = []
        for answer in answers:
            text = self._opening(ask) + self._tokenizer.decode(list(answer.completion.token_ids))
            said: Conversation = answer.completion.token_ids
            if isinstance(ask.body, ChatRequest):
                calls = list(answer.message.tool_calls)
                message = ChatMessage(role="assistant", content=answer.message.content, tool_calls=calls)
                said = canonical_messages([message.plain()])
            elif isinstance(ask.conversation, str):
                # With the token that ended it: a prompt without its text does not continue the tokens.
                said = self._tokenizer.hf.decode(list(answer.completion.token_ids))
            choices.append(Choice(answer.completion, said, text))
        prompt, said_before = tuple(ask.prompt), ask.conversation
        call = Call(ask.response, prompt, said_before, ask.turns, tuple(choices), ask.trained, engine, ask.images)
        await self.sessions.answered(ask.begun, call)

    async def _or_failed(self, asks: list[CheckedRequest], work: Coroutine[Any, Any, R]) -> R:
        """Return the result of ``work``; if that fails, end the calls in their session."""
        try:
            return await work
        except BaseException as error:
            await self._failed(asks, error)
            raise

    async def _failed(self, asks: list[CheckedRequest], error: BaseException) -> None:
        away = isinstance(error, ActorUnreachable)  # a keeper's successor does not know the calls
        for ask in asks:
            if self.sessions is not None and ask.begun is not None and not away:
                with contextlib.suppress(Exception):  # the first error is raised
                    await asyncio.shield(self.sessions.failed(ask.begun, api_error(error).code))

    def _reply(self, asks: list[CheckedRequest]) -> ReplyForm:
        forms: dict[type[Sampled], type[ReplyForm]] = {ResponsesRequest: ResponseReply, MessagesRequest: MessagesReply}
        form = forms.get(type(asks[0].body), ChoicesReply)
        return form(asks, self.settings.model, self._tokenizer)


def _request(ask: CheckedRequest, n: int) -> exchange.Request:
    """Return the request of an engine for ``n`` answers."""
    most, scored = ask.body.alternatives or 0, ask.body.scored
    return exchange.Request(ask.prompt, n, ask.sampling, ask.images, alternatives=most, scored=scored)
