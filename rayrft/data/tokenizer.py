"""The only place where prompts and demonstrations are tokenised."""

from __future__ import annotations

import hashlib
import json
import pickle
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from rayrft.config.model import TemplateConfig
from rayrft.data.images import ImageReader, insert_images
from rayrft.data.reasoning import (
    REASONING_MARKS,
    ReasoningMarks,
    ReasoningSplit,
    opened_reasoning,
    split_reasoning,
    unread_reasoning,
)
from rayrft.errors import DataError, ModelError, first_line

_TOKEN_CHARACTERS = 16
"""Mean characters of a token that no text exceeds but one of white space."""
_ANSWER = "[the answer that was sampled]"
"""Stands for an answer whose tokens are there already, where the chat template is asked what follows it."""

Messages = list[dict[str, Any]]
Tools = tuple[dict[str, Any], ...]
"""JSON schemas of the functions that a model may call, as chat templates take them."""

INCOMPLETE = "\ufffd"
"""What a decoder writes for the bytes of a character that are not all there."""


def fills(texts: Iterable[str], tokens: int) -> bool:
    """Return whether texts have more characters than so many tokens ever have, which is known without tokenising them:
    that takes seconds for a megabyte, in which the event loop does nothing else."""
    return sum(map(len, texts)) > _TOKEN_CHARACTERS * tokens


def common_length(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the number of items with which both sequences begin."""
    differ = (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differ, min(len(one), len(other)))


class ChatTokenizer:
    """A Hugging Face tokenizer for chat conversations.

    Without a chat template a conversation is the concatenation of its messages, ended by a newline, or by EOS after the
    assistant; it begins with BOS if the tokenizer adds one. Raises ModelError, which names the config's ``field``, if
    the tokenizer is missing or has no EOS token.
    """

    def __init__(self, path: str | Path, field: str = "model.path", template: TemplateConfig | None = None) -> None:
        from transformers import AutoTokenizer

        self.path, self._key = str(path), f"{field.rpartition('.')[0]}.template"
        try:
            self.hf: Any = AutoTokenizer.from_pretrained(str(path))
        except (OSError, ValueError) as error:
            problem = f"no tokenizer can be loaded: {first_line(error)}"
            remedy = "give a folder or hub id that transformers.AutoTokenizer loads"
            raise ModelError(problem, remedy, field=field, value=str(path)) from None
        if self.hf.eos_token_id is None:
            problem = "the tokenizer has no EOS token, so no answer could ever end"
            remedy = "set tokenizer.eos_token and save the tokenizer again"
            raise ModelError(problem, remedy, field=field, value=str(path))
        self._has_own = template is not None and template != TemplateConfig()
        if template is not None and template.file is not None:
            self.hf.chat_template = template.file.read_text(encoding="utf-8")
        for name, value in template.options.items() if template is not None else ():
            if not self.has_option(name):
                where, remedy = f"{self._key}.options.{name}", "see the template's own, or give another template"
                raise ModelError("the chat template has no such variable", remedy, field=where, value=value)
            # A default, so that the template has it wherever it is saved to, and requests may have their own.
            self.hf.chat_template = f"{{%- set {name} = {name} | default({value!r}) %}}{self._template}"

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "images"}  # which has a cache of images

    @cached_property
    def end_id(self) -> int:
        """The token that ends an answer: the one that the chat template writes after it, else EOS."""
        for token in self.tokens(self._probed()[2].lstrip())[:1]:
            if token in self.hf.added_tokens_decoder:
                return token
        return int(self.hf.eos_token_id)

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """The tokens that an answer stops at: its end, EOS, and those of the model's ``generation_config``."""
        from transformers import GenerationConfig

        try:
            more = GenerationConfig.from_pretrained(self.path).eos_token_id
        except OSError:  # it has none
            more = None
        ids = [self.end_id, self.hf.eos_token_id, *(more if isinstance(more, list) else [more])]
        return tuple(dict.fromkeys(token for token in ids if token is not None))

    @cached_property
    def digest(self) -> str:
        """Digest of the vocabulary and the config's chat template: with equal ones, ids and prompts mean the same."""
        vocabulary = json.dumps(sorted(self.hf.get_vocab().items())) + (self._template if self._has_own else "")
        return hashlib.blake2b(vocabulary.encode(), digest_size=8).hexdigest()

    @cached_property
    def images(self) -> ImageReader:
        """Image reader of the tokenizer's model. Raises ModelError if the model takes no images."""
        return ImageReader(self.path)

    @property
    def takes_tools(self) -> bool:
        """Whether the chat template shows tools, and so has messages of role ``tool``."""
        return re.search(r"\btools\b", self._template) is not None

    @property
    def shows_tool_calls(self) -> bool:
        """Whether the chat template shows calls of tools."""
        return re.search(r"\btool_calls\b", self._template) is not None

    @property
    def shows_reasoning(self) -> bool:
        """Whether the chat template shows reasoning, or begins answers with it."""
        return re.search(r"think|reasoning", self._template) is not None

    @property
    def unread_reasoning(self) -> str | None:
        """The name of the form in which the model writes reasoning, if answers are not split there."""
        return unread_reasoning(self._template) if self._marks is None else None

    def shown_calls(self, calls: list[dict[str, Any]], tools: Tools) -> str | None:
        """Return the text in which the chat template shows an assistant's calls of tools, without the end of the turn;
        None if it rejects them."""
        user = {"role": "user", "content": "?"}
        try:
            prompt, _ = self._render([user], tools, add_generation_prompt=True)
            whole, _ = self._render([user, {"role": "assistant", "content": "", "tool_calls": calls}], tools)
        except DataError:
            return None
        shown = split_reasoning(whole[common_length(prompt, whole) :])[1].strip()
        for mark in map(self._mark, self.stop_ids):
            shown = shown.removesuffix(mark).rstrip()
        return shown

    def leaves_out_reasoning(
        self, messages: Messages, tools: Tools = (), options: Mapping[str, Any] | None = None
    ) -> list[bool]:
        """Return for each message whether it is an answer whose reasoning the chat template leaves out of a prompt.

        Raises DataError if the template rejects the messages.
        """
        probed, (opening, closing) = list[dict[str, Any]](), REASONING_MARKS
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                said = f"{opening}\n{_ANSWER}{number}.\n{closing}\n\n{split_reasoning(message['content'])[1]}"
                message = {key: value for key, value in message.items() if key != "reasoning_content"}
                message["content"] = said
            probed.append(message)
        text, _ = self._render(probed, tools, options, add_generation_prompt=True)
        return [
            message["role"] == "assistant" and f"{_ANSWER}{number}." not in text
            for number, message in enumerate(messages)
        ]

    def has_option(self, name: str) -> bool:
        """Whether the chat template has a variable of that name that is not set by what it is to show."""
        taken = {"messages", "tools", "documents", "add_generation_prompt", *self.hf.special_tokens_map}
        return name.isidentifier() and name not in taken and bool(re.search(rf"\b{name}\b", self._template))

    def prompt(
        self,
        messages: Messages,
        images: tuple[str, ...] = (),
        tools: Tools = (),
        options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return token ids up to the start of the assistant's turn, with all placeholder tokens of the images.
        ``options`` are values of the chat template's variables, before those of the config.

        Raises DataError if the chat template rejects the messages, ModelError if the model takes no images.
        """
        shown = pickle.dumps((self._with_images(messages, images), tools, options))
        ids = list(_encode_prompt(self, shown, self._template))
        return _repeat(ids, self.images.repeats(ids, images)) if images else ids

    def observation(
        self,
        messages: Messages,
        observed: Messages,
        images: tuple[str, ...] = (),
        tools: Tools = (),
        options: Mapping[str, Any] | None = None,
        *,
        last: int,
    ) -> list[int]:
        """Token ids that follow the last turn of ``messages``, which is the assistant's and ends with token ``last``.
        They close the turn as the chat template does, unless ``last`` does that, and continue with ``observed`` and the
        beginning of the next turn.

        Appended to the sequence as it was sampled, they leave every token before them as it is, even if the template
        would write earlier turns differently now. Raises DataError where it refuses the messages or changes the turn.
        """
        if observed[0]["role"] == "tool" and self._ties_results_to_calls:
            rest = self._after_calls(messages[-1], observed, tools, options, last)
        else:
            rest = self._after_answer(messages, self._with_images(observed, images), tools, options, last)
        ids = self.tokens(rest)
        return _repeat(ids, self.images.repeats(ids, images)) if images else ids

    def _after_answer(
        self, messages: Messages, observed: Messages, tools: Tools, options: Mapping[str, Any] | None, last: int
    ) -> str:
        """Return the text that follows an answer, whose place is found by a text in it."""
        answer = _ANSWER
        while any(answer in message["content"] for message in observed):
            answer = f"[{answer}]"
        shown = [*messages[:-1], {"role": "assistant", "content": answer}, *observed]
        text, _ = self._render(shown, tools, options, add_generation_prompt=True)
        _, mark, rest = text.rpartition(answer)
        if not mark:
            raise DataError("the chat template leaves the assistant's turn out once another message follows")
        for mark in map(self._mark, (self.end_id, last) if last in self.stop_ids else ()):
            if rest.lstrip().startswith(mark):  # it is there already
                return rest.lstrip().removeprefix(mark)
        return rest

    def _after_calls(
        self, answer: dict[str, Any], observed: Messages, tools: Tools, options: Mapping[str, Any] | None, last: int
    ) -> str:
        """Return the text that results of tools add to an answer, for templates that show them after calls alone."""
        named = [message.get("name") or "tool" for message in observed if message["role"] == "tool"]
        known = answer.get("tool_calls") or [{"function": {"name": name, "arguments": {}}} for name in named]
        calls = [{**call, "type": "function", "id": f"call{number:05}"} for number, call in enumerate(known)]
        observed = [{**message, "tool_call_id": f"call{number:05}"} for number, message in enumerate(observed)]
        shown: Messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": calls}]
        before, _ = self._render(shown, tools, options)
        after, _ = self._render([*shown, *observed], tools, options, add_generation_prompt=True)
        if not after.startswith(before):
            raise DataError("the chat template changes the assistant's turn once the results of its calls follow")
        ends = self.tokens(before)[-1]
        there = last == ends or ends not in self.hf.added_tokens_decoder
        return after[len(before) - (0 if there else len(self._mark(ends))) :]

    @cached_property
    def _ties_results_to_calls(self) -> bool:
        """Whether the chat template rejects, or leaves out, a tool's result that follows an answer without calls."""
        said = [{"role": role, "content": "?"} for role in ("user", "assistant")]
        try:
            return _ANSWER not in self._render([*said, {"role": "tool", "name": "tool", "content": _ANSWER}])[0]
        except DataError:
            return True

    def response(self, text: str) -> list[int]:
        """Return the token ids of an answer to a prompt, with the token that ends it."""
        if not text:
            return [self.end_id]
        ids, mask = self.chat([{"role": "user", "content": "?"}, {"role": "assistant", "content": text}])
        return ids[mask.index(1) :]

    def chat(self, messages: Messages, images: tuple[str, ...] = (), tools: Tools = ()) -> tuple[list[int], list[int]]:
        """Return token ids and action mask, of equal length, of a conversation that ends with the assistant.

        The mask is 1 on every turn of the assistant without ``weight`` 0, including the token that ends it. The chat
        template determines the bounds of a turn: by its ``{% generation %}`` markers, else by the text it adds to the
        prompt for that turn. The last turn ends the sequence, and gets an end if the template adds none.

        Raises DataError if the template rejects the messages, no single sequence contains all trained turns, or none is
        trained, and ModelError if the model takes no images.
        """
        spoken = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        trained = [index for index in spoken if messages[index].get("weight") != 0]
        if not trained or trained[-1] != len(messages) - 1:
            raise DataError("the last message, or every one of the assistant, has weight 0", "leave it out")
        plain = [{key: value for key, value in message.items() if key != "weight"} for message in messages]
        converted = self._with_images(plain, images)
        if re.search(r"\{%-?\s*generation\s*-?%\}", self._template):
            text, turns = self._marked_turns(converted, tools)
            if len(trained) < len(spoken):
                if len(turns) != len(spoken):
                    problem = f"the chat template marks {len(turns)} turns of {len(spoken)}, of which not all train"
                    raise DataError(problem)
                turns = [turn for index, turn in zip(spoken, turns, strict=True) if index in trained]
        else:
            text, turns = self._appended_turns(converted, tools, trained)
        ids: list[int] = []
        mask: list[int] = []
        done = 0
        for start, end in turns:
            end = self._after_end(text, start, end)
            # A turn is tokenised separately from the prompt before it, as in a rollout.
            for piece, action in ((text[done:start], 0), (text[start:end], 1)):
                tokens = self.tokens(piece)
                ids += tokens
                mask += [action] * len(tokens)
            done = end
        if ids[-1] not in self.stop_ids:
            ids.append(self.end_id)
            mask.append(1)
        if images:
            repeats = self.images.repeats(ids, images)
            ids, mask = _repeat(ids, repeats), _repeat(mask, repeats)
        return ids, mask

    def whole(self, messages: Messages, images: tuple[str, ...] = (), tools: Tools = ()) -> tuple[list[int], list[int]]:
        """Return token ids and action mask of a conversation as reward models score it: what
        `PreTrainedTokenizer.apply_chat_template` gives, all in one piece and with what the template writes after the
        last turn. The mask is 1 from the first token in which it differs from the prompt of its last turn.

        Raises DataError if the template rejects the messages, and ModelError if there is none, or the model takes no
        images.
        """
        if not self._template:
            raise self._no_template("a reward model needs")
        prompt = self.prompt(messages[:-1], images, tools)
        ids = self.tokens(self._render(self._with_images(messages, images), tools)[0])
        if images:
            ids = _repeat(ids, self.images.repeats(ids, images))
        shared = min(common_length(prompt, ids), len(ids) - 1)
        return ids, [0] * shared + [1] * (len(ids) - shared)

    def texts(self, prompt: str, completion: str) -> tuple[list[int], list[int]]:
        """Return token ids and action mask of a completion, which EOS ends, right after a prompt, without the chat
        template. The mask is 1 from the first token in which they differ from those of the prompt alone; the first one
        of all, which has no probability, is part of the prompt. Source: `SFTTrainer` of trl 1.16."""
        end = "" if completion.endswith(self.hf.eos_token) else self.hf.eos_token
        before = self.hf(prompt)["input_ids"] if prompt else []
        ids = list(self.hf(prompt + completion + end)["input_ids"])
        shared = max(1, common_length(before, ids))
        return ids, [0] * shared + [1] * (len(ids) - shared)

    def decode(self, token_ids: Sequence[int], before: str = "") -> str:
        """Decode an answer, or a part that follows the text ``before``, without padding and the template's marks of
        turns and of their ends. Its reasoning is between ``<think>`` and ``</think>``."""
        silent = self._silent
        # `decode` would look at every token once more, in Python.
        text = str(self.hf._decode([token for token in token_ids if token not in silent], skip_special_tokens=False))
        return text if self._marks is None else self._marks.readable(text, before)

    def answer(self, token_ids: Sequence[int]) -> str:
        """Decode an answer to a chat prompt; it begins with the ``<think>`` that the prompt has opened, if any."""
        return self._opening + self.decode(token_ids)

    def opening(self, options: Mapping[str, Any] | None = None) -> str:
        """Return the beginning of answers that the template writes, from ``<think>`` on; empty if the model does."""
        return self._opened(options) if options else self._opening

    @cached_property
    def _opening(self) -> str:
        return self._opened()

    def _opened(self, options: Mapping[str, Any] | None = None) -> str:
        prompt = self._probed(options, add_generation_prompt=True)[-1]
        return opened_reasoning(prompt if self._marks is None else self._marks.readable(prompt, ""))

    @cached_property
    def _marks(self) -> ReasoningMarks | None:
        """The marks of the model's reasoning, if they are not ``<think>`` and ``</think>``."""
        return ReasoningMarks.among(map(str, self.hf.added_tokens_decoder.values()))

    def tokens_at(self, token_ids: Sequence[int], text: str, ends: Sequence[int]) -> list[int]:
        """Return for each character offset of ``ends``, which increase, the index of the token with which the answer's
        ``text`` up to there is complete. That token has the last byte of the last character.

        Raises ValueError if that is not what the tokens begin with.
        """
        ids = list(token_ids)
        if (known := self._known_after(ids, text)) is not None:
            return [bisect_left(known, end) for end in ends]
        found = list[int]()

        def begins_with(part: str) -> Callable[[int], bool]:
            return lambda count: self.decode(ids[:count]).startswith(part)

        for end in ends:
            least = found[-1] + 1 if found else 1
            count = bisect_left(range(len(ids) + 1), True, lo=least, key=begins_with(text[:end]))
            if count > len(ids):
                raise ValueError(f"the answer's tokens do not begin with the first {end} characters of its text")
            found.append(count - 1)
        return found

    def _known_after(self, ids: list[int], text: str) -> list[int] | None:
        """Return for each token the number of characters of the text that are complete with it. Return None if the text
        is not the sequence of the decoded tokens, or has incomplete characters: then prefixes must be decoded."""
        if INCOMPLETE in text:
            return None
        known, first, done = list[int](), 0, 0
        for index in range(len(ids)):
            part = self.decode(ids[first : index + 1])
            whole = part.rstrip(INCOMPLETE)
            if not text.startswith(whole, done):
                return None
            known.append(done + len(whole))
            if whole == part:
                first, done = index + 1, known[-1]
        return known if done == len(text) else None

    def defuse(self, text: str) -> str:
        """Return a text from outside, in which what would become a special token is broken up by a blank; but for tags
        that the user has added, such as ``<answer>`` and ``</answer>``."""
        return self._control.sub(lambda found: f"{found[0][0]} {found[0][1:]}", text)

    @cached_property
    def _special(self) -> dict[int, str]:
        return {index: str(token) for index, token in self.hf.added_tokens_decoder.items() if token.special}

    @cached_property
    def _silent(self) -> frozenset[int]:
        """Tokens that are not part of an answer's text."""
        between = self.tokens("".join(self._probed(add_generation_prompt=True)[1:]))
        read = REASONING_MARKS if self._marks is None else self._marks.tokens
        marks = {token for token in between if self._special.get(token) not in (None, *read)}
        return frozenset({*marks, *self.stop_ids, self.hf.pad_token_id, self.hf.bos_token_id} - {None})

    @cached_property
    def _control(self) -> re.Pattern[str]:
        marks = {*map(self._mark, self._silent)}
        texts = {*self._special.values(), *marks}
        tags = {text for text in texts if {f"<{text.strip('</>')}>", f"</{text.strip('</>')}>"} <= texts - marks}
        return re.compile("|".join(map(re.escape, sorted(texts - tags, key=len, reverse=True))))

    @property
    def _template(self) -> str:
        return self.hf.get_chat_template() if self.hf.chat_template else ""

    def tokens(self, text: str, *, begins: bool = False) -> list[int]:
        """Return a text's token ids; if it ``begins`` a sequence, after the tokenizer's BOS unless it has it."""
        bos = self._bos if begins and not text.startswith(self._bos) else ""
        return list(self.hf.encode(bos + text, add_special_tokens=False))

    @cached_property
    def _bos(self) -> str:
        """The BOS that the tokenizer adds before a text, if it does."""
        bos = self.hf.bos_token_id
        return str(self.hf.bos_token) if bos is not None and bos in self.hf.encode("")[:1] else ""

    def _mark(self, token: int) -> str:
        return str(self.hf.convert_ids_to_tokens(token))

    def _probed(self, options: Mapping[str, Any] | None = None, **settings: bool) -> list[str]:
        """Return the texts that the template writes before, between and after a question and its answer; with
        ``add_generation_prompt``, and another question. All are empty if it does not take such messages."""
        messages = [{"role": role, "content": _ANSWER} for role in ("user", "assistant", "user")][: 2 + len(settings)]
        try:
            parts = self._render(messages, (), options, **settings)[0].split(_ANSWER)
        except DataError:
            parts = []
        return parts if len(parts) == len(messages) + 1 else [""] * 4

    def _with_images(self, messages: Messages, images: tuple[str, ...]) -> list[dict[str, Any]]:
        """Return the messages with their images, in the form of chat templates."""
        if images and not self._template:
            raise self._no_template("images need")
        return insert_images(messages, len(images)) if images else messages

    def _no_template(self, why: str) -> ModelError:
        problem = f"the tokenizer has no chat template, which {why}"
        remedy = "set tokenizer.chat_template and save the tokenizer again"
        return ModelError(problem, remedy, field="model.path", value=self.path)

    def _render(
        self,
        messages: list[dict[str, Any]],
        tools: Tools = (),
        options: Mapping[str, Any] | None = None,
        **settings: bool,
    ) -> tuple[str, list[tuple[int, int]]]:
        """Render the messages as text; also return the spans between the template's markers, if requested.

        Raises DataError if the template rejects the messages, and ModelError if it is not Jinja.
        """
        if tools and not self.takes_tools:
            remedy = "describe them in the system message, or give the tokenizer a template that does"
            raise DataError("the chat template shows no tools", remedy)
        for name in options or ():
            if not self.has_option(name):
                raise DataError("the chat template has no such variable", field=f"chat_template_kwargs.{name}")
        if not self._template:
            ends = {"assistant": self.hf.eos_token}
            text = "".join(message["content"] + ends.get(message["role"], "\n") for message in messages)
            return self._bos + text, []
        if self._marks is not None:
            messages = [self._as_written(message) for message in messages]
        from jinja2 import TemplateError, TemplateSyntaxError
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            texts, marked = render_jinja_template(
                [messages],
                list(tools) or None,
                chat_template=self._template,
                **settings,
                **{**self.hf.special_tokens_map, **(options or {})},
            )
        except TemplateSyntaxError as error:
            problem = f"line {error.lineno} of the chat template is not Jinja: {error.message}"
            raise ModelError(problem, "correct the template", field=f"{self._key}.file") from None
        except Exception as error:  # a template may do anything with what it finds in messages
            kind = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
            raise DataError(f"the chat template rejects the messages: {kind}{error}") from None
        return texts[0], marked[0] if marked else []

    def _as_written(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return a message whose reasoning is in the fields that the chat template reads, else in the content between
        the model's own marks."""
        said = message["content"] if message["role"] == "assistant" else None
        parts = ReasoningSplit.of(said if isinstance(said, str) else "")
        reasoning = message.get("reasoning_content") or parts.reasoning
        if self._marks is None or not isinstance(said, str) or not reasoning:
            return message
        answer = parts.content
        fields = re.findall(
            r"message(?:\.|\[['\"]|\.get\(['\"])(reasoning_content|reasoning|thinking)\b", self._template
        )
        if message.get("tool_calls") and answer:
            fields = [name for name in fields if name != "thinking"]  # gpt-oss refuses both with a call
        content = answer if fields else self._marks.written(reasoning, answer)
        return {**message, "content": content, **dict.fromkeys(fields, reasoning)}

    def _marked_turns(self, messages: list[dict[str, Any]], tools: Tools) -> tuple[str, list[tuple[int, int]]]:
        """Return the conversation as text, and the spans between the template's markers."""
        text, turns = self._render(messages, tools, return_assistant_tokens_mask=True)
        if not turns:
            raise DataError("the {% generation %} markers of the chat template enclose no turn of these messages")
        return text, turns

    def _appended_turns(
        self, messages: list[dict[str, Any]], tools: Tools, trained: list[int]
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return the conversation as text, and the spans that the ``trained`` turns append to their prompts."""
        text, turns = "", []
        for index in trained:
            message = messages[index]
            prompt, _ = self._render(messages[:index], tools, add_generation_prompt=True)
            extended, _ = self._render(messages[: index + 1], tools)
            if message is messages[-1] and not extended.startswith(prompt):
                extended = prompt + self._continued(message["content"]) + self._mark(self.end_id)
            if not prompt.startswith(text) or not extended.startswith(prompt):
                raise DataError(
                    f"message {index + 1} does not continue what the chat template writes before it (some templates "
                    "strip earlier reasoning), so no sequence of tokens holds all turns",
                    "give one row per turn of the assistant, or a chat template with {% generation %} markers",
                )
            text = extended[: self._after_end(extended, len(prompt), len(extended))]
            turns.append((len(prompt), len(text)))
        return text, turns

    def _continued(self, answer: str) -> str:
        """Return an answer as a model gives it to a prompt that its template does not show again before it."""
        if (opening := self.opening()) and not split_reasoning(answer)[0]:
            closing = REASONING_MARKS[1] if self._marks is None else self._marks.closing
            return f"\n{closing}\n\n{answer}"
        return answer.removeprefix(opening).removeprefix(REASONING_MARKS[0] if opening else "")

    def _after_end(self, text: str, start: int, end: int) -> int:
        """Return the end of a turn, after its stop token, which may stand before other text or after the marker."""
        for mark in map(self._mark, self.stop_ids):
            if (at := text.rfind(mark, start, end + len(mark))) >= 0:
                return at + len(mark)
        return end


@lru_cache(maxsize=64)
def _encode_prompt(tokenizer: ChatTokenizer, shown: bytes, template: str) -> tuple[int, ...]:
    """Return token ids of pickled messages, tools and options up to the start of the assistant's turn, but for images.

    All repeats of a group have one prompt. ``template`` is only part of the cache's key. The cache is not an attribute
    of the tokenizer, which travels between processes.
    """
    return tuple(tokenizer.tokens(tokenizer._render(*pickle.loads(shown), add_generation_prompt=True)[0]))


def _repeat(values: list[int], times: list[int]) -> list[int]:
    return [value for value, count in zip(values, times, strict=True) for _ in range(count)]
