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

import numpy as np

from rayrft.config.model import TemplateConfig
from rayrft.data.chat_template import ChatTemplate, Messages, Tools, common_length
from rayrft.data.images import ImageReader, insert_images
from rayrft.data.reasoning import REASONING_MARKS
from rayrft.errors import DataError, ModelError, first_line

_TOKEN_CHARACTERS = 16
"""Mean characters of a token that no text exceeds but one of white space."""

INCOMPLETE = "\ufffd"
"""What a decoder writes for the bytes of a character that are not all there."""


def fills(texts: Iterable[str], tokens: int) -> bool:
    """Return whether texts have more characters than so many tokens ever have, which is known without tokenising them:
    that takes seconds for a megabyte, in which the event loop does nothing else."""
    return sum(map(len, texts)) > _TOKEN_CHARACTERS * tokens


class ChatTokenizer:
    """A Hugging Face tokenizer for chat conversations, which its chat template writes as text.

    Raises ModelError, which names the config's ``field``, if the tokenizer is missing or has no EOS token.
    """

    def __init__(self, path: str | Path, field: str = "model.path", template: TemplateConfig | None = None) -> None:
        from transformers import AutoTokenizer

        self.path = str(path)
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
        self.template = ChatTemplate(self.hf, f"{field.rpartition('.')[0]}.template", template)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "images"}  # which has a cache of images

    @cached_property
    def end_id(self) -> int:
        """The token that ends an answer: the one that the chat template writes after it, else EOS."""
        for token in self.tokens(self.template.around()[2].lstrip())[:1]:
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

    @property
    def ends(self) -> list[str]:
        """The texts of `stop_ids`."""
        return [self._mark(token) for token in self.stop_ids]

    @cached_property
    def digest(self) -> str:
        """Digest of the vocabulary and the config's chat template: with equal ones, ids and prompts mean the same."""
        vocabulary = json.dumps(sorted(self.hf.get_vocab().items()))
        vocabulary += self.template.text if self.template.is_own else ""
        return hashlib.blake2b(vocabulary.encode(), digest_size=8).hexdigest()

    @cached_property
    def images(self) -> ImageReader:
        """Image reader of the tokenizer's model. Raises ModelError if the model takes no images."""
        return ImageReader(self.path)

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
        ids = list(_encode_prompt(self, shown, self.template.text))
        return np.repeat(ids, self.images.repeats(ids, images)).tolist() if images else ids

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
        if observed[0]["role"] == "tool" and self.template.ties_results_to_calls:
            before, rest = self.template.around_results(messages[-1], observed, tools, options)
            ends = self.tokens(before)[-1]
            if last != ends and ends in self.hf.added_tokens_decoder:
                rest = self._mark(ends) + rest
        else:
            ended = map(self._mark, (self.end_id, last) if last in self.stop_ids else ())
            rest = self.template.after_answer(messages, self._with_images(observed, images), tools, options, ended)
        ids = self.tokens(rest)
        return np.repeat(ids, self.images.repeats(ids, images)).tolist() if images else ids

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
        text, turns = self.template.turns(self._with_images(plain, images), tools, trained, self.ends)
        ids: list[int] = []
        mask: list[int] = []
        done = 0
        for start, end in turns:
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
            ids, mask = (np.repeat(each, repeats).tolist() for each in (ids, mask))
        return ids, mask

    def whole(self, messages: Messages, images: tuple[str, ...] = (), tools: Tools = ()) -> tuple[list[int], list[int]]:
        """Return token ids and action mask of a conversation as reward models score it: what
        `PreTrainedTokenizer.apply_chat_template` gives, all in one piece and with what the template writes after the
        last turn. The mask is 1 from the first token in which it differs from the prompt of its last turn.

        Raises DataError if the template rejects the messages, and ModelError if there is none, or the model takes no
        images.
        """
        if not self.template.text:
            raise self._no_template("a reward model needs")
        prompt = self.prompt(messages[:-1], images, tools)
        ids = self.tokens(self.template.render(self._with_images(messages, images), tools)[0])
        if images:
            ids = np.repeat(ids, self.images.repeats(ids, images)).tolist()
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
        marks = self.template.marks
        return text if marks is None else marks.readable(text, before)

    def answer(self, token_ids: Sequence[int]) -> str:
        """Decode an answer to a chat prompt; it begins with the ``<think>`` that the prompt has opened, if any."""
        return self.template.opening() + self.decode(token_ids)

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
        between = self.tokens("".join(self.template.around(add_generation_prompt=True)[1:]))
        read = REASONING_MARKS if self.template.marks is None else self.template.marks.tokens
        marks = {token for token in between if self._special.get(token) not in (None, *read)}
        return frozenset({*marks, *self.stop_ids, self.hf.pad_token_id, self.hf.bos_token_id} - {None})

    @cached_property
    def _control(self) -> re.Pattern[str]:
        marks = {*map(self._mark, self._silent)}
        texts = {*self._special.values(), *marks}
        tags = {text for text in texts if {f"<{text.strip('</>')}>", f"</{text.strip('</>')}>"} <= texts - marks}
        return re.compile("|".join(map(re.escape, sorted(texts - tags, key=len, reverse=True))))

    def tokens(self, text: str, *, begins: bool = False) -> list[int]:
        """Return a text's token ids; if it ``begins`` a sequence, after the tokenizer's BOS unless it has it."""
        bos = self.template.bos if begins and not text.startswith(self.template.bos) else ""
        return list(self.hf.encode(bos + text, add_special_tokens=False))

    def _mark(self, token: int) -> str:
        return str(self.hf.convert_ids_to_tokens(token))

    def _with_images(self, messages: Messages, images: tuple[str, ...]) -> list[dict[str, Any]]:
        """Return the messages with their images, in the form of chat templates."""
        if images and not self.template.text:
            raise self._no_template("images need")
        return insert_images(messages, len(images)) if images else messages

    def _no_template(self, why: str) -> ModelError:
        problem = f"the tokenizer has no chat template, which {why}"
        remedy = "set tokenizer.chat_template and save the tokenizer again"
        return ModelError(problem, remedy, field="model.path", value=self.path)


@lru_cache(maxsize=64)
def _encode_prompt(tokenizer: ChatTokenizer, shown: bytes, template: str) -> tuple[int, ...]:
    """Return token ids of pickled messages, tools and options up to the start of the assistant's turn, but for images.

    All repeats of a group have one prompt. ``template`` is only part of the cache's key. The cache is not an attribute
    of the tokenizer, which travels between processes.
    """
    return tuple(tokenizer.tokens(tokenizer.template.render(*pickle.loads(shown), add_generation_prompt=True)[0]))
