"""Text to tokens, once: the only place where prompts and demonstrations are tokenised."""

from __future__ import annotations

from pathlib import Path

from rayrft.errors import ModelError


class ChatTokenizer:
    """A Hugging Face tokenizer with what training asks of it: an EOS token and a chat template.

    Raises ModelError when the tokenizer is missing, or has no EOS (an answer could never end).
    """

    def __init__(self, path: str | Path) -> None:
        from transformers import AutoTokenizer

        try:
            self.hf = AutoTokenizer.from_pretrained(str(path))
        except (OSError, ValueError) as error:
            raise ModelError(
                f"no tokenizer can be loaded: {str(error).splitlines()[0]}",
                field="model.path",
                value=str(path),
                remedy="give a folder or hub id that transformers.AutoTokenizer loads",
            ) from None
        if self.hf.eos_token_id is None:
            raise ModelError(
                "the tokenizer has no EOS token, so no answer could ever end",
                field="model.path",
                value=str(path),
                remedy="set tokenizer.eos_token and save the tokenizer again",
            )
        self.eos_id: int = self.hf.eos_token_id

    def prompt(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids up to where the assistant's turn begins; without a chat template the contents, line by line."""
        if self.hf.chat_template:
            text = self.hf.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        else:
            text = "\n".join(message["content"] for message in messages) + "\n"
        return list(self.hf.encode(text, add_special_tokens=False))

    def response(self, text: str) -> list[int]:
        """Token ids of an answer, closed by EOS."""
        return [*self.hf.encode(text, add_special_tokens=False), self.eos_id]

    def decode(self, token_ids: list[int]) -> str:
        """The text of an answer, special tokens left out."""
        return str(self.hf.decode(token_ids, skip_special_tokens=True))
