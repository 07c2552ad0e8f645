"""Chat templates: conversations as text, and the places of turns and of reasoning in it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from rayrft.config.model import TemplateConfig
from rayrft.data.reasoning import (
    REASONING_MARKS,
    ReasoningMarks,
    ReasoningSplit,
    opened_reasoning,
    split_reasoning,
    unread_reasoning,
)
from rayrft.errors import DataError, ModelError
from rayrft.files import read_text

_ANSWER = "[the answer that was sampled]"
"""Stands for an answer whose tokens are there already, where the chat template is asked what follows it."""

Messages = list[dict[str, Any]]
Tools = tuple[dict[str, Any], ...]
"""JSON schemas of the functions that a model may call, as chat templates take them."""
Spans = list[tuple[int, int]]
"""Places in a text: begin and end."""


def common_length(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the number of items with which both sequences begin."""
    differ = (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differ, min(len(one), len(other)))


class ChatTemplate:
    """The chat template of a Hugging Face tokenizer, with the file and the options of the config at ``key``.

    ``ends`` are the texts of the tokens that end an answer, the one that the template writes first. Without a template
    a conversation is the concatenation of its messages, ended by a newline, or by EOS after the assistant; it begins
    with BOS if the tokenizer adds one. Raises ModelError for an option that the template does not have.
    """

    def __init__(self, hf: Any, key: str, config: TemplateConfig | None) -> None:
        self._hf, self._key = hf, key
        self.is_own = config is not None and config != TemplateConfig()
        """Whether the config changes it."""
        if config is not None and config.file is not None:
            hf.chat_template = read_text(config.file, f"{key}.file")
        for name, value in config.options.items() if config is not None else ():
            if not self.has_option(name):
                where, remedy = f"{key}.options.{name}", "see the template's own, or give another template"
                raise ModelError("the chat template has no such variable", remedy, field=where, value=value)
            # A default, so that the template has it wherever it is saved to, and requests may have their own.
            hf.chat_template = f"{{%- set {name} = {name} | default({value!r}) %}}{self.text}"

    @property
    def text(self) -> str:
        """The template; empty if there is none."""
        return self._hf.get_chat_template() if self._hf.chat_template else ""

    @property
    def takes_tools(self) -> bool:
        """Whether it shows tools, and so has messages of role ``tool``."""
        return re.search(r"\btools\b", self.text) is not None

    @property
    def shows_tool_calls(self) -> bool:
        """Whether it shows calls of tools."""
        return re.search(r"\btool_calls\b", self.text) is not None

    @property
    def shows_reasoning(self) -> bool:
        """Whether it shows reasoning, or begins answers with it."""
        return re.search(r"think|reasoning", self.text) is not None

    @property
    def unread_reasoning(self) -> str | None:
        """The name of the form in which the model writes reasoning, if answers are not split there."""
        return unread_reasoning(self.text) if self.marks is None else None

    @cached_property
    def marks(self) -> ReasoningMarks | None:
        """The marks of the model's reasoning, if they are not ``<think>`` and ``</think>``."""
        return ReasoningMarks.among(map(str, self._hf.added_tokens_decoder.values()))

    @cached_property
    def bos(self) -> str:
        """The BOS that the tokenizer adds before a text, if it does."""
        bos = self._hf.bos_token_id
        return str(self._hf.bos_token) if bos is not None and bos in self._hf.encode("")[:1] else ""

    def has_option(self, name: str) -> bool:
        """Whether it has a variable of that name that is not set by what it is to show."""
        taken = {"messages", "tools", "documents", "add_generation_prompt", *self._hf.special_tokens_map}
        return name.isidentifier() and name not in taken and bool(re.search(rf"\b{name}\b", self.text))

    def render(
        self, messages: Messages, tools: Tools = (), options: Mapping[str, Any] | None = None, **settings: bool
    ) -> tuple[str, Spans]:
        """Render the messages as text; also return the spans between the template's markers, if requested.

        Raises DataError if the template rejects the messages, and ModelError if it is not Jinja.
        """
        if tools and not self.takes_tools:
            remedy = "describe them in the system message, or give a template that does (model.template.file)"
            raise DataError("the chat template shows no tools", remedy)
        for name in options or ():
            if not self.has_option(name):
                raise DataError("the chat template has no such variable", field=f"chat_template_kwargs.{name}")
        if not self.text:
            ends = {"assistant": self._hf.eos_token}
            text = "".join(message["content"] + ends.get(message["role"], "\n") for message in messages)
            return self.bos + text, []
        if self.marks is not None:
            messages = [self._as_written(message, self.marks) for message in messages]
        from jinja2 import TemplateError, TemplateSyntaxError
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            texts, marked = render_jinja_template(
                [messages],
                list(tools) or None,
                chat_template=self.text,
                **settings,
                **{**self._hf.special_tokens_map, **(options or {})},
            )
        except TemplateSyntaxError as error:
            problem = f"line {error.lineno} of the chat template is not Jinja: {error.message}"
            raise ModelError(problem, "correct the template", field=f"{self._key}.file") from None
        except Exception as error:  # a template may do anything with what it finds in messages
            kind = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
            raise DataError(f"the chat template rejects the messages: {kind}{error}") from None
        return texts[0], marked[0] if marked else []

    def _as_written(self, message: dict[str, Any], marks: ReasoningMarks) -> dict[str, Any]:
        """Return a message whose reasoning is in the fields that the template reads, else in the content between the
        model's own marks."""
        said = message["content"] if message["role"] == "assistant" else None
        parts = ReasoningSplit.of(said if isinstance(said, str) else "")
        reasoning = message.get("reasoning_content") or parts.reasoning
        if not isinstance(said, str) or not reasoning:
            return message
        fields = re.findall(r"message(?:\.|\[['\"]|\.get\(['\"])(reasoning_content|reasoning|thinking)\b", self.text)
        if message.get("tool_calls") and parts.content:
            fields = [name for name in fields if name != "thinking"]  # gpt-oss refuses both with a call
        content = parts.content if fields else marks.written(reasoning, parts.content)
        return {**message, "content": content, **dict.fromkeys(fields, reasoning)}

    def around(self, options: Mapping[str, Any] | None = None, **settings: bool) -> list[str]:
        """Return the texts that the template writes before, between and after a question and its answer; with
        ``add_generation_prompt``, and another question. All are empty if it does not take such messages."""
        messages = [{"role": role, "content": _ANSWER} for role in ("user", "assistant", "user")][: 2 + len(settings)]
        try:
            parts = self.render(messages, (), options, **settings)[0].split(_ANSWER)
        except DataError:
            parts = []
        return parts if len(parts) == len(messages) + 1 else [""] * 4

    def opening(self, options: Mapping[str, Any] | None = None) -> str:
        """Return the beginning of answers that the template writes, from ``<think>`` on; empty if the model does."""
        return self._opened(options) if options else self._opening

    @cached_property
    def _opening(self) -> str:
        return self._opened()

    def _opened(self, options: Mapping[str, Any] | None = None) -> str:
        prompt = self.around(options, add_generation_prompt=True)[-1]
        return opened_reasoning(prompt if self.marks is None else self.marks.readable(prompt, ""))

    def shown_calls(self, calls: list[dict[str, Any]], tools: Tools, ends: Iterable[str]) -> str | None:
        """Return the text in which the template shows an assistant's calls of tools, without the end of the turn; None
        if it rejects them."""
        user = {"role": "user", "content": "?"}
        try:
            prompt, _ = self.render([user], tools, add_generation_prompt=True)
            whole, _ = self.render([user, {"role": "assistant", "content": "", "tool_calls": calls}], tools)
        except DataError:
            return None
        shared = whole[: common_length(prompt, whole)]
        shared = re.sub(r"[<\[][^<>\[\]]*$", "", shared)  # two marks may begin alike
        shown = split_reasoning(whole[len(shared) :])[1].strip()
        for end in ends:
            shown = shown.removesuffix(end).rstrip()
        return shown

    def leaves_out_reasoning(
        self, messages: Messages, tools: Tools = (), options: Mapping[str, Any] | None = None
    ) -> list[bool]:
        """Return for each message whether it is an answer whose reasoning the template leaves out of a prompt.

        Raises DataError if the template rejects the messages.
        """
        probed, (opening, closing) = list[dict[str, Any]](), REASONING_MARKS
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                said = f"{opening}\n{_ANSWER}{number}.\n{closing}\n\n{split_reasoning(message['content'])[1]}"
                message = {key: value for key, value in message.items() if key != "reasoning_content"}
                message["content"] = said
            probed.append(message)
        text, _ = self.render(probed, tools, options, add_generation_prompt=True)
        return [
            message["role"] == "assistant" and f"{_ANSWER}{number}." not in text
            for number, message in enumerate(messages)
        ]

    def after_answer(
        self,
        messages: Messages,
        observed: Messages,
        tools: Tools,
        options: Mapping[str, Any] | None,
        ended: Iterable[str],
    ) -> str:
        """Return the text that follows the last of ``messages``, an answer whose place is found by a text in it,
        without those of the ends in ``ended`` with which it begins."""
        answer = _ANSWER
        while any(answer in message["content"] for message in observed):
            answer = f"[{answer}]"
        shown = [*messages[:-1], {"role": "assistant", "content": answer}, *observed]
        text, _ = self.render(shown, tools, options, add_generation_prompt=True)
        _, mark, rest = text.rpartition(answer)
        if not mark:
            raise DataError("the chat template leaves the assistant's turn out once another message follows")
        for end in ended:
            if rest.lstrip().startswith(end):  # it is there already
                return rest.lstrip().removeprefix(end)
        return rest

    def around_results(
        self, answer: dict[str, Any], observed: Messages, tools: Tools, options: Mapping[str, Any] | None
    ) -> tuple[str, str]:
        """Return a text that ends with an answer's calls of tools, and what their results add to it, for templates that
        show results after calls alone."""
        named = [message.get("name") or "tool" for message in observed if message["role"] == "tool"]
        known = answer.get("tool_calls") or [{"function": {"name": name, "arguments": {}}} for name in named]
        calls = [{**call, "type": "function", "id": f"call{number:05}"} for number, call in enumerate(known)]
        observed = [{**message, "tool_call_id": f"call{number:05}"} for number, message in enumerate(observed)]
        shown: Messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": calls}]
        before, _ = self.render(shown, tools, options)
        after, _ = self.render([*shown, *observed], tools, options, add_generation_prompt=True)
        if not after.startswith(before):
            raise DataError("the chat template changes the assistant's turn once the results of its calls follow")
        return before, after[len(before) :]

    @cached_property
    def ties_results_to_calls(self) -> bool:
        """Whether it rejects, or leaves out, a tool's result that follows an answer without calls."""
        said = [{"role": role, "content": "?"} for role in ("user", "assistant")]
        try:
            return _ANSWER not in self.render([*said, {"role": "tool", "name": "tool", "content": _ANSWER}])[0]
        except DataError:
            return True

    def turns(self, messages: Messages, tools: Tools, trained: list[int], ends: Sequence[str]) -> tuple[str, Spans]:
        """Return a conversation as text, and the spans of its ``trained`` turns, which are the assistant's, with their
        ends: those between the template's ``{% generation %}`` markers, else what it adds to the prompt for each.

        Raises DataError if the template rejects the messages, or no single text contains all trained turns.
        """
        marked = re.search(r"\{%-?\s*generation\s*-?%\}", self.text)
        find = self._marked_turns if marked else self._appended_turns
        text, spans = find(messages, tools, trained, ends)
        return text, [(start, _after_end(text, start, end, ends)) for start, end in spans]

    def _marked_turns(
        self, messages: Messages, tools: Tools, trained: list[int], ends: Sequence[str]
    ) -> tuple[str, Spans]:
        text, spans = self.render(messages, tools, return_assistant_tokens_mask=True)
        if not spans:
            raise DataError("the {% generation %} markers of the chat template enclose no turn of these messages")
        spoken = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        if len(trained) < len(spoken):
            if len(spans) != len(spoken):
                raise DataError(f"the chat template marks {len(spans)} turns of {len(spoken)}, of which not all train")
            spans = [span for index, span in zip(spoken, spans, strict=True) if index in trained]
        return text, spans

    def _appended_turns(
        self, messages: Messages, tools: Tools, trained: list[int], ends: Sequence[str]
    ) -> tuple[str, Spans]:
        text, turns = "", []
        for index in trained:
            message = messages[index]
            prompt, _ = self.render(messages[:index], tools, add_generation_prompt=True)
            extended, _ = self.render(messages[: index + 1], tools)
            if message is messages[-1] and not extended.startswith(prompt):
                extended = prompt + self._continued(message["content"]) + ends[0]
            if not prompt.startswith(text) or not extended.startswith(prompt):
                problem = f"message {index + 1} does not continue what the chat template writes before it (some "
                problem += "templates strip earlier reasoning), so no sequence of tokens holds all turns"
                remedy = "give one row per turn of the assistant, or a chat template with {% generation %} markers"
                raise DataError(problem, remedy)
            text = extended[: _after_end(extended, len(prompt), len(extended), ends)]
            turns.append((len(prompt), len(text)))
        return text, turns

    def _continued(self, answer: str) -> str:
        """Return an answer as a model gives it to a prompt that its template does not show again before it."""
        if (opening := self.opening()) and not split_reasoning(answer)[0]:
            closing = REASONING_MARKS[1] if self.marks is None else self.marks.closing
            return f"\n{closing}\n\n{answer}"
        return answer.removeprefix(opening).removeprefix(REASONING_MARKS[0] if opening else "")


def _after_end(text: str, start: int, end: int, ends: Sequence[str]) -> int:
    """Return the end of a turn, after its stop token, which may stand before other text or after the marker."""
    for mark in ends:
        if (at := text.rfind(mark, start, end + len(mark))) >= 0:
            return at + len(mark)
    return end
