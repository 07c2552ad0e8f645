"""The only place where prompts and demonstrations are tokenised."""

from __future__ import annotations

import hashlib
import json
import pickle
import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from rayrft.data.images import ImageReader, insert_images
from rayrft.data.reasoning import opened_reasoning
from rayrft.errors import DataError, ModelError

_ANSWER = "[the answer that was sampled]"
"""Stands for an answer whose tokens are there already, where the chat template is asked what follows it."""

Tools = tuple[dict[str, Any], ...]
"""JSON schemas of the functions that a model may call, as chat templates take them."""

INCOMPLETE = "\ufffd"
"""What a decoder writes for the bytes of a character that are not all there."""

_CALL_MARKS = ("<tool_call>", "</tool_call>")


class ChatTokenizer:
    """A Hugging Face tokenizer for chat conversations.

    Without a chat template a conversation is the concatenation of its messages, ended by a newline, or by EOS after the
    assistant. Raises ModelError, which names the config's ``field``, if the tokenizer is missing or has no EOS token.
    """

    def __init__(self, path: str | Path, field: str = "model.path") -> None:
        from transformers import AutoTokenizer

        self._path = str(path)
        try:
            self.hf = AutoTokenizer.from_pretrained(str(path))
        except (OSError, ValueError) as error:
            raise ModelError(
                f"no tokenizer can be loaded: {str(error).splitlines()[0]}",
                field=field,
                value=str(path),
                remedy="give a folder or hub id that transformers.AutoTokenizer loads",
            ) from None
        if self.hf.eos_token_id is None:
            raise ModelError(
                "the tokenizer has no EOS token, so no answer could ever end",
                field=field,
                value=str(path),
                remedy="set tokenizer.eos_token and save the tokenizer again",
            )
        self.eos_id: int = self.hf.eos_token_id

    @cached_property
    def digest(self) -> str:
        """Digest of the vocabulary: tokenizers with equal digests mean the same by the same ids."""
        vocabulary = json.dumps(sorted(self.hf.get_vocab().items())).encode()
        return hashlib.blake2b(vocabulary, digest_size=8).hexdigest()

    @cached_property
    def images(self) -> ImageReader:
        """Image reader of the tokenizer's model. Raises ModelError if the model takes no images."""
        return ImageReader(self._path)

    @property
    def takes_tools(self) -> bool:
        """Whether the chat template shows tools, and so has messages of role ``tool``."""
        return re.search(r"\btools\b", self._template) is not None

    def prompt(self, messages: list[dict[str, str]], images: tuple[str, ...] = (), tools: Tools = ()) -> list[int]:
        """Return token ids up to the start of the assistant's turn, with all placeholder tokens of the images.

        Raises DataError if the chat template rejects the messages, ModelError if the model takes no images.
        """
        shown = pickle.dumps((self._with_images(messages, images), tools))
        ids = list(_encode_prompt(self, shown, self._template))
        return _repeat(ids, self.images.repeats(ids, images)) if images else ids

    def observation(
        self,
        messages: list[dict[str, str]],
        observed: list[dict[str, str]],
        images: tuple[str, ...] = (),
        tools: Tools = (),
        *,
        closed: bool,
    ) -> list[int]:
        """Token ids that follow the last turn of ``messages``, which is the assistant's: what the chat template closes
        it with (but its EOS, where the turn is ``closed`` by that), ``observed``, and the beginning of the next turn.

        Appended to the sequence as it was sampled, they leave every token before them as it is, also where the template
        would write earlier turns differently now. Raises DataError where it refuses the messages or does not keep the
        text of the turn.
        """
        answer = _ANSWER
        while any(answer in message["content"] for message in observed):
            answer = f"[{answer}]"
        shown = [*messages[:-1], {"role": "assistant", "content": answer}, *self._with_images(observed, images)]
        text, _ = self._render(shown, tools, add_generation_prompt=True)
        _, mark, rest = text.rpartition(answer)
        if not mark:
            raise DataError("the chat template leaves the assistant's turn out once another message follows")
        before, eos, after = rest.partition(self.hf.eos_token)
        if closed and eos and not before.strip():
            rest = after
        ids = self._encode(rest)
        return _repeat(ids, self.images.repeats(ids, images)) if images else ids

    def response(self, text: str) -> list[int]:
        """Return the token ids of an answer, ended by EOS."""
        return [*self._encode(text), self.eos_id]

    def chat(
        self, messages: list[dict[str, str]], images: tuple[str, ...] = (), tools: Tools = ()
    ) -> tuple[list[int], list[int]]:
        """Return token ids and action mask, of equal length, of a conversation that ends with the assistant.

        The mask is 1 on every turn of the assistant, including the EOS that ends it. The chat template determines the
        bounds of a turn: by its ``{% generation %}`` markers, else by the text it adds to the prompt for that turn. The
        last turn ends the sequence, and gets an EOS if the template adds none.

        Raises DataError if the template rejects the messages, or no single sequence contains all turns, and ModelError
        if the model takes no images.
        """
        converted = self._with_images(messages, images)
        find = self._marked_turns if self._has_markers() else self._appended_turns
        text, turns = find(converted, tools)
        ids: list[int] = []
        mask: list[int] = []
        done = 0
        for start, end in turns:
            end = self._after_eos(text, start, end)
            # A turn is tokenised separately from the prompt before it, as in a rollout.
            for piece, action in ((text[done:start], 0), (text[start:end], 1)):
                tokens = self._encode(piece)
                ids += tokens
                mask += [action] * len(tokens)
            done = end
        if ids[-1:] != [self.eos_id]:
            ids.append(self.eos_id)
            mask.append(1)
        if images:
            repeats = self.images.repeats(ids, images)
            ids, mask = _repeat(ids, repeats), _repeat(mask, repeats)
        return ids, mask

    def whole(
        self, messages: list[dict[str, str]], images: tuple[str, ...] = (), tools: Tools = ()
    ) -> tuple[list[int], list[int]]:
        """Return token ids and action mask of a conversation as reward models score it: what
        `PreTrainedTokenizer.apply_chat_template` gives, all in one piece and with what the template writes after the
        last turn. The mask is 1 from the first token in which it differs from the prompt of its last turn.

        Raises DataError if the template rejects the messages, and ModelError if there is none, or the model takes no
        images.
        """
        if not self._template:
            raise self._no_template("a reward model needs")
        prompt = self.prompt(messages[:-1], images, tools)
        ids = self._encode(self._render(self._with_images(messages, images), tools)[0])
        if images:
            ids = _repeat(ids, self.images.repeats(ids, images))
        shared = next((at for at, (one, two) in enumerate(zip(prompt, ids, strict=False)) if one != two), len(prompt))
        shared = min(shared, len(ids) - 1)
        return ids, [0] * shared + [1] * (len(ids) - shared)

    def decode(self, token_ids: list[int]) -> str:
        """Decode an answer without special tokens, but for those around calls of tools."""
        kept = [token for token in token_ids if token not in self._silent]
        return str(self.hf.decode(kept, skip_special_tokens=False))

    def answer(self, token_ids: Sequence[int]) -> str:
        """Decode an answer to a chat prompt; it begins with the ``<think>`` that the prompt has opened, if any."""
        return self.opening + self.decode(list(token_ids))

    @cached_property
    def opening(self) -> str:
        """Text from ``<think>`` on with which the chat template begins an answer; empty if the model writes that."""
        try:
            return opened_reasoning(self._render([{"role": "user", "content": ""}], add_generation_prompt=True)[0])
        except DataError:  # it asks for other messages
            return ""

    def tokens_at(self, token_ids: Sequence[int], text: str, ends: Sequence[int]) -> list[int]:
        """Return for each character offset of ``ends``, which increase, the index of the token with which the answer's
        ``text`` up to there is complete: of the one that its last character, or the last byte of that, is in.

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
        """Return for each token the number of characters of the text that are whole with it; None if the text is not
        made of what the tokens are by themselves, but for the bytes of a character, or has some that are none. Then
        only whole prefixes tell, each of which takes time."""
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
        """Return a text from outside, in which what would become a special token is broken up by a blank."""
        return self._control.sub(lambda found: f"{found[0][0]} {found[0][1:]}", text) if self._control else text

    @cached_property
    def _special(self) -> dict[int, str]:
        return {index: str(token) for index, token in self.hf.added_tokens_decoder.items() if token.special}

    @cached_property
    def _silent(self) -> frozenset[int]:
        return frozenset(index for index, text in self._special.items() if text not in _CALL_MARKS)

    @cached_property
    def _control(self) -> re.Pattern[str] | None:
        texts = [re.escape(text) for text in self._special.values()]
        return re.compile("|".join(texts)) if texts else None

    @property
    def _template(self) -> str:
        return self.hf.get_chat_template() if self.hf.chat_template else ""

    def _encode(self, text: str) -> list[int]:
        return list(self.hf.encode(text, add_special_tokens=False))

    def _with_images(self, messages: list[dict[str, str]], images: tuple[str, ...]) -> list[dict[str, Any]]:
        """Return the messages with their images, in the form of chat templates."""
        if images and not self._template:
            raise self._no_template("images need")
        return insert_images(messages, len(images)) if images else messages

    def _no_template(self, why: str) -> ModelError:
        return ModelError(
            f"the tokenizer has no chat template, which {why}",
            field="model.path",
            value=self._path,
            remedy="set tokenizer.chat_template and save the tokenizer again",
        )

    def _render(
        self, messages: list[dict[str, Any]], tools: Tools = (), **options: bool
    ) -> tuple[str, list[tuple[int, int]]]:
        """Render the messages as text; also return the spans between the template's markers, if requested."""
        if tools and not self.takes_tools:
            raise DataError(
                "the chat template shows no tools",
                remedy="describe them in the system message, or give the tokenizer a template that does",
            )
        if not self._template:
            ends = {"assistant": self.hf.eos_token}
            return "".join(message["content"] + ends.get(message["role"], "\n") for message in messages), []
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            texts, marked = render_jinja_template(
                [messages],
                list(tools) or None,
                chat_template=self._template,
                **options,
                **self.hf.special_tokens_map,
            )
        except TemplateError as error:
            raise DataError(f"the chat template rejects the messages: {error}") from None
        return texts[0], marked[0] if marked else []

    def _has_markers(self) -> bool:
        return re.search(r"\{%-?\s*generation\s*-?%\}", self._template) is not None

    def _marked_turns(self, messages: list[dict[str, Any]], tools: Tools) -> tuple[str, list[tuple[int, int]]]:
        """Return the conversation as text, and the spans between the template's markers."""
        text, turns = self._render(messages, tools, return_assistant_tokens_mask=True)
        if not turns:
            raise DataError("the {% generation %} markers of the chat template enclose no turn of these messages")
        return text, turns

    def _appended_turns(self, messages: list[dict[str, Any]], tools: Tools) -> tuple[str, list[tuple[int, int]]]:
        """Return the conversation as text, and the spans that the assistant's turns append to their prompts."""
        text, turns = "", []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt, _ = self._render(messages[:index], tools, add_generation_prompt=True)
            extended, _ = self._render(messages[: index + 1], tools)
            if not prompt.startswith(text) or not extended.startswith(prompt):
                raise DataError(
                    f"message {index + 1} does not continue what the chat template writes before it (some templates "
                    "strip earlier reasoning), so no sequence of tokens holds all turns",
                    remedy="give one row per turn of the assistant, or a chat template with {% generation %} markers",
                )
            turns.append((len(prompt), len(extended)))
            text = extended
        return text, turns

    def _after_eos(self, text: str, start: int, end: int) -> int:
        """Return the end of a turn: right after its EOS, which templates put before other text or after the marker."""
        eos = self.hf.eos_token
        at = text.rfind(eos, start, end + len(eos))
        return end if at < 0 else at + len(eos)


@lru_cache(maxsize=64)
def _encode_prompt(tokenizer: ChatTokenizer, shown: bytes, template: str) -> tuple[int, ...]:
    """Return token ids of pickled messages and tools up to the start of the assistant's turn, without those of images.

    All repeats of a group have one prompt. ``template`` is only part of the cache's key. The cache is no attribute of
    the tokenizer, which travels between processes.
    """
    return tuple(tokenizer._encode(tokenizer._render(*pickle.loads(shown), add_generation_prompt=True)[0]))


def _repeat(values: list[int], times: list[int]) -> list[int]:
    return [value for value, count in zip(values, times, strict=True) for _ in range(count)]
