"""The HTTP application of the endpoint: takes requests, lets the engines answer, and tells the sessions."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import math
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import asdict, replace
from typing import Any, Protocol, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from rayrft.data.tokenizer import ChatTokenizer
from rayrft.errors import DataError, FeedbackRefused
from rayrft.explorer.engines import exchange
from rayrft.explorer.engines.exchange import Chunk, Completion, Sampling, Session, Told
from rayrft.explorer.tools.parsing import instructed
from rayrft.serve.decoding import AnswerText, cut, message
from rayrft.serve.protocol import (
    ApiError,
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    FeedbackRequest,
    ResponsesRequest,
    Sampled,
    key_digest,
    parse,
)
from rayrft.serve.recording import Begun, Call, Choice, Conversation, canonical
from rayrft.serve.replies import (
    Answer,
    Ask,
    ChoicesReply,
    EventStream,
    Piece,
    Reply,
    api_error,
    as_event,
    unless_gone,
)
from rayrft.serve.responses import ResponseReply
from rayrft.serve.sessions import SessionStats
from rayrft.serve.settings import EndpointSettings

R = TypeVar("R")


class StreamingEngines(Protocol):
    """Anything that answers requests, and tells their tokens as they are sampled."""

    async def generate(
        self, request: exchange.Request, sessions: Sequence[Session] = (), told: Told | None = None
    ) -> list[Completion]: ...


class Recording(Protocol):
    """What is told of every call: see `SessionKeeper`."""

    async def begin(self, session: str, task: str | None, conversation: Conversation) -> Begun: ...

    async def answered(self, begun: Begun, call: Call) -> None: ...

    async def failed(self, begun: Begun, reason: str) -> None: ...

    async def feedback(self, name: str, reward: float, components: dict[str, float]) -> str: ...

    async def stats(self) -> SessionStats: ...


class Endpoint:
    """The API over some engines. ``sessions`` is None where calls are not recorded."""

    def __init__(
        self,
        engines: StreamingEngines,
        sessions: Recording | None,
        tokenizer: ChatTokenizer,
        settings: EndpointSettings,
        count: Callable[[str], None] = lambda outcome: None,
    ) -> None:
        """``count`` is told how every request ended: its status and code."""
        self._engines = engines
        self._sessions = sessions
        self._tokenizer = tokenizer
        self._settings = settings
        self._config = settings.config
        self._count = count
        self._open = 0
        self.outcomes: Counter[str] = Counter()
        """Requests by how they ended."""

    def app(self) -> FastAPI:
        """Build the application."""
        app = FastAPI(openapi_url=None)
        answers: dict[str, tuple[type[Sampled], str]] = {
            "/v1/chat/completions": (ChatRequest, "chatcmpl-"),
            "/v1/completions": (CompletionRequest, "cmpl-"),
            "/v1/responses": (ResponsesRequest, "resp_"),
        }
        # An application that can be given nothing but a base URL has its session there.
        for base in ("", "/sessions/{session}"):
            for path, (model, prefix) in answers.items():
                handle = self._route(self._answering(model, prefix), self._config.max_requests)
                app.add_api_route(base + path, handle, methods=["POST"])
            app.add_api_route(f"{base}/v1/feedback", self._route(self._feedback), methods=["POST"])
            app.add_api_route(f"{base}/v1/models", self._route(self._models), methods=["GET"])
            app.add_api_route(base + "/v1/models/{name:path}", self._route(self._model), methods=["GET"])
            app.add_api_route(f"{base}/v1/stats", self._route(self._stats), methods=["GET"])
        app.add_api_route("/health", self._health, methods=["GET"])
        return app

    # Every request.

    def _route(
        self, handle: Callable[[Request], Awaitable[Response]], at_most: float = math.inf
    ) -> Callable[[Request], Awaitable[Response]]:
        """Return the handler of a route: with the key checked, and errors in the form of the API. It refuses requests
        while ``at_most`` are open."""

        async def route(request: Request) -> Response:
            try:
                self._check_key(request)
                if self._open >= at_most:
                    raise ApiError(
                        429,
                        f"The server has {self._open} open requests, which is its limit.",
                        code="rate_limit_exceeded",
                        kind="requests",
                        headers={"Retry-After": "1"},
                    )
                self._open += 1
                try:
                    response = await handle(request)
                except BaseException:
                    self._open -= 1
                    raise
                if isinstance(response, EventStream):
                    response.ended = self._stream_ended
                else:
                    self._open -= 1
                    self._end("200")
                return response
            except asyncio.CancelledError:
                self._end("499 client_gone")
                raise
            except Exception as error:  # whatever went wrong is an answer to this request
                problem = api_error(error)
                self._end(f"{problem.status} {problem.code}")
                return JSONResponse(problem.body, problem.status, problem.headers)

        return route

    def _stream_ended(self, outcome: str) -> None:
        self._open -= 1
        self._end(outcome)

    def _end(self, outcome: str) -> None:
        self.outcomes[outcome] += 1
        self._count(outcome)

    def _check_key(self, request: Request) -> None:
        digests = self._settings.key_digests
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        given = key_digest(key.strip()) if scheme.lower() == "bearer" else ""
        # All are compared, each in constant time: the time tells nothing of the keys.
        known = [hmac.compare_digest(given, digest) for digest in digests]
        if digests and not any(known):
            raise ApiError(401, "Incorrect API key provided.", code="invalid_api_key")

    async def _body(self, request: Request) -> bytes:
        """Read the body. Raises ApiError 413 as soon as it is known to be too large."""
        limit = self._config.max_body_kib << 10
        declared, body = request.headers.get("content-length", ""), bytearray()
        if not declared.isdecimal() or int(declared) <= limit:
            async for part in request.stream():
                body += part
                if len(body) > limit:
                    break
            else:
                return bytes(body)
        # What the client goes on sending is not read.
        headers = {"Connection": "close"}
        raise ApiError(413, f"The body has more than {limit} bytes.", code="request_too_large", headers=headers)

    # Answers.

    def _answering(self, model: type[Sampled], prefix: str) -> Callable[[Request], Awaitable[Response]]:
        async def handle(request: Request) -> Response:
            body = parse(model, await self._body(request))
            if body.model != self._settings.model and not self._settings.any_model:
                raise ApiError(
                    404,
                    f"The model {body.model!r} does not exist; there is {self._settings.model!r}.",
                    code="model_not_found",
                    param="model",
                )
            response = f"{prefix}{uuid.uuid4().hex}"
            named = request.path_params.get("session") or request.headers.get("x-session-id")
            session = named or body.metadata.session_id or body.user or response
            task = request.headers.get("x-task-id") or body.metadata.task_id
            headers = {"X-Session-Id": session} if session.isascii() and session.isprintable() else {}
            ask = await self._begin(body, response, session, task)
            if body.stream:
                return EventStream(self._events(ask), headers)
            answers = await self._or_failed(ask, unless_gone(request, self._answers(ask, None)))
            return JSONResponse(self._reply(ask).whole(answers), headers=headers)

        return handle

    async def _begin(self, body: Sampled, response: str, session: str, task: str | None) -> Ask:
        """Check a request, and begin its call in its session."""
        sampling, trained = self._sampling(body)
        if isinstance(body, ChatRequest):
            plain: list[dict[str, Any]] = [{"tools": list(body.shown_tools)}, *(each.plain() for each in body.messages)]
            conversation: Conversation = canonical(plain)
            turns = tuple(each.for_display() for each in body.messages)
        else:
            assert isinstance(body, CompletionRequest)
            prompt = body.prompt
            conversation = prompt if isinstance(prompt, str) else tuple(prompt)
            turns = (
                {"role": "user", "content": prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt)},
            )
        begun = await self._begun(session, task, conversation)
        ask = Ask(body, response, begun, conversation, turns, [], sampling, trained, None)

        async def checked() -> Ask:
            ids, new_turns = self._tokenise(ask)
            room = self._settings.max_length - len(ids)
            if room <= 0:
                raise ApiError(
                    400,
                    f"This model's maximum context length is {self._settings.max_length} tokens. However, your prompt "
                    f"resulted in {len(ids)} tokens, which leaves no room for an answer.",
                    code="context_length_exceeded",
                    param="messages" if isinstance(body, ChatRequest) else "prompt",
                )
            limit = min(body.limit or self._settings.sampling.max_tokens, room)
            tools = isinstance(body, ChatRequest) and body.shown_tools
            form = self._config.tool_calls if tools else None
            return replace(ask, prompt=ids, turns=new_turns, sampling=replace(sampling, max_tokens=limit), form=form)

        return await self._or_failed(ask, checked())

    async def _begun(self, session: str, task: str | None, conversation: Conversation) -> Begun | None:
        """Begin a call in its session, if calls are recorded."""
        if self._sessions is None:
            return None
        beginning = asyncio.ensure_future(self._sessions.begin(session, task, conversation))
        try:
            return await asyncio.shield(beginning)
        except asyncio.CancelledError:  # the call may have begun: nobody else would end it
            await self._sessions.failed(await beginning, api_error(asyncio.CancelledError()).code)
            raise

    def _sampling(self, body: Sampled) -> tuple[Sampling, bool]:
        """Return how to sample, and whether that is as the run trains."""
        rules = self._settings.sampling
        run = Sampling(rules.temperature, rules.max_tokens, (self._tokenizer.eos_id,), body.seed, rules.repetition)
        asked = replace(
            run,
            temperature=run.temperature if body.temperature is None else body.temperature,
            top_p=body.top_p or 1.0,
            top_k=max(0, body.top_k or 0),
        )
        if asked == run or self._config.off_policy == "ignore":
            return run, True
        if self._config.off_policy == "refuse":
            changed = [key for key in ("temperature", "top_p", "top_k") if getattr(asked, key) != getattr(run, key)]
            raise ApiError(
                400,
                f"{changed[0]}: this endpoint samples at temperature {run.temperature:g}, without top_p or top_k.",
                code="unsupported_value",
                param=changed[0],
            )
        return asked, False

    def _tokenise(self, ask: Ask) -> tuple[list[int], tuple[dict[str, str], ...]]:
        """Return the prompt's token ids, and the turns that are not in its prefix. Raises DataError."""
        body, tokenizer = ask.body, self._tokenizer
        prefix = ask.begun.prefix if ask.begun is not None else None
        known = prefix.length if prefix is not None else 0
        if isinstance(body, ChatRequest):
            tools, form, bare = body.shown_tools, self._config.tool_calls, not tokenizer.takes_tools
            messages = [each.for_bare_template(form) if bare else each.for_template() for each in body.messages]
            # The first entry of the conversation stands for the tools.
            old, new = (messages[: known - 1], messages[known - 1 :]) if prefix is not None else (messages, [])
            if tools and bare:
                old, tools = instructed(old, tools, form), ()
            if prefix is None:
                return tokenizer.prompt(old, (), tools), ask.turns
            closed = prefix.token_ids[-1] == tokenizer.eos_id
            observed = tokenizer.observation(old, new, (), tools, closed=closed)
            return [*prefix.token_ids, *observed], ask.turns[known - 1 :]
        rest: Any = ask.conversation[known:]
        text = rest if isinstance(rest, str) else tokenizer.decode(list(rest))
        ids = tokenizer.hf.encode(rest, add_special_tokens=prefix is None) if isinstance(rest, str) else rest
        return [*(prefix.token_ids if prefix is not None else ()), *ids], ({"role": "user", "content": text},)

    async def _answers(self, ask: Ask, show: Callable[[Piece], None] | None) -> list[Answer]:
        """Sample the answers. Where they are to be shown as they are sampled, or end at stop strings, each has a
        request of its own."""
        prefix = ask.begun.prefix if ask.begun is not None else None
        sessions = [Session(prefix.engine if prefix is not None else None) for _ in range(ask.body.n)]
        async with asyncio.timeout(self._config.deadline_s):
            if show is None and not ask.body.stops:
                request = exchange.Request(ask.prompt, ask.body.n, ask.sampling)
                completions = await self._engines.generate(request, sessions)
                answers = [self._finished(ask, index, each, None) for index, each in enumerate(completions)]
            else:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(self._stream(ask, *each, show)) for each in enumerate(sessions)]
                answers = [task.result() for task in tasks]
        await self._record(ask, answers, sessions[0].engine)
        return answers

    async def _stream(self, ask: Ask, index: int, session: Session, show: Callable[[Piece], None] | None) -> Answer:
        """Sample one answer up to a stop string."""
        text = AnswerText(self._tokenizer, ask.body.stops, ask.form)

        def told(chunk: Chunk) -> None:
            if text.stopped_at is not None:
                return
            before = text.tokens
            if text.add(chunk.token_ids):
                session.interrupt()
            if show is not None and ((piece := text.show()) or ask.body.wants_logprobs):
                count = text.tokens - before
                show(Piece(index, piece, Chunk(chunk.token_ids[:count], chunk.logprobs[:count])))

        seed = None if ask.sampling.seed is None else ask.sampling.seed + index
        request = exchange.Request(ask.prompt, 1, replace(ask.sampling, seed=seed), stream=True)
        [completion] = await self._engines.generate(request, [session], told)
        return self._finished(ask, index, completion, text)

    def _finished(self, ask: Ask, index: int, completion: Completion, text: AnswerText | None) -> Answer:
        """Return an answer to which no token will be added; ``text`` has those of which was told."""
        if text is None:
            whole = self._tokenizer.decode(list(completion.token_ids))
            tail = Piece(index, whole, Chunk(completion.token_ids, completion.logprobs))
        else:
            told = text.tokens
            text.add(completion.token_ids[told:])
            completion = cut(completion, text.stopped_at)
            rest = Chunk(completion.token_ids[told:], completion.logprobs[told:])
            tail = Piece(index, text.end(), rest)
            whole = text.text
        found = message(whole, ask.form)
        shown = len(whole) - len(tail.text)
        return Answer(completion, whole, found, replace(tail, text=found.content[shown:]))

    async def _record(self, ask: Ask, answers: list[Answer], engine: str | None) -> None:
        if self._sessions is None or ask.begun is None:
            return
        choices = []
        for answer in answers:
            text = self._tokenizer.decode(list(answer.completion.token_ids))
            if isinstance(ask.body, ChatRequest):
                calls = list(answer.message.tool_calls)
                said = ChatMessage(role="assistant", content=answer.message.content, tool_calls=calls)
                choices.append(Choice(answer.completion, canonical([said.plain()]), text))
            elif isinstance(ask.conversation, str):
                # With what ended it: a prompt that leaves that out does not continue the tokens.
                said_text = self._tokenizer.hf.decode(list(answer.completion.token_ids))
                choices.append(Choice(answer.completion, said_text, text))
            else:
                choices.append(Choice(answer.completion, answer.completion.token_ids, text))
        call = Call(ask.response, tuple(ask.prompt), ask.conversation, ask.turns, tuple(choices), ask.trained, engine)
        await self._sessions.answered(ask.begun, call)

    async def _or_failed(self, ask: Ask, work: Coroutine[Any, Any, R]) -> R:
        """Return the result of ``work``; if it fails, the call of its session has failed, too."""
        try:
            return await work
        except BaseException as error:
            if self._sessions is not None and ask.begun is not None:
                with contextlib.suppress(Exception):  # the error that is raised comes first
                    await asyncio.shield(self._sessions.failed(ask.begun, api_error(error).code))
            raise

    async def _events(self, ask: Ask) -> AsyncIterator[str]:
        """Yield the events of a streamed response; the last ones once the call is recorded."""
        pieces: asyncio.Queue[Piece | None] = asyncio.Queue()
        answering = asyncio.ensure_future(self._or_failed(ask, self._answers(ask, pieces.put_nowait)))
        answering.add_done_callback(lambda _: pieces.put_nowait(None))
        reply = self._reply(ask)
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
            yield as_event(problem.body)
            raise problem from None
        finally:
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)

    def _reply(self, ask: Ask) -> Reply:
        form = ResponseReply if isinstance(ask.body, ResponsesRequest) else ChoicesReply
        return form(ask, self._settings.model, self._tokenizer)

    # Other routes.

    async def _feedback(self, request: Request) -> Response:
        body = parse(FeedbackRequest, await self._body(request))
        if self._sessions is None:
            raise ApiError(400, "This endpoint records no sessions: serve.record is false.", code="not_recorded")
        try:
            session = await self._sessions.feedback(body.id, body.reward, body.components)
        except DataError as error:
            unknown = error.field == "id"
            code = "session_not_found" if unknown else "invalid_value"
            raise ApiError(404 if unknown else 400, str(error), code=code, param=error.field) from None
        except FeedbackRefused as error:
            code = "already_rewarded" if error.value == "rewarded" else "too_late"
            headers = {"x-should-retry": "false"}  # OpenAI's client would send it again
            raise ApiError(409, str(error), code=code, param="id", headers=headers) from None
        return JSONResponse({"object": "feedback", "session_id": session, "reward": body.reward})

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def _model(self, request: Request) -> Response:
        if (name := request.path_params["name"]) != self._settings.model:
            raise ApiError(404, f"The model {name!r} does not exist.", code="model_not_found", param="model")
        return JSONResponse(self._card())

    async def _stats(self, request: Request) -> Response:
        sessions = asdict(await self._sessions.stats()) if self._sessions is not None else None
        return JSONResponse({"open": self._open, "requests": dict(self.outcomes), "sessions": sessions})

    async def _health(self) -> Response:
        return Response()

    def _card(self) -> dict[str, Any]:
        size = self._settings.max_length
        return {
            "id": self._settings.model,
            "object": "model",
            "created": 0,
            "owned_by": "rayrft",
            "max_model_len": size,
        }
