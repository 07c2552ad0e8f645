"""Models that a run reads: whether they are there, and go together."""

from __future__ import annotations

from pathlib import Path

from rayrft.buffer.tokens import ChatTokenizer
from rayrft.errors import ModelError


def find_model(path: str, field: str) -> str:
    """A folder as an absolute path, or a hub id as it is. Raises ModelError, which names the field, where neither is
    there."""
    if Path(path).is_dir():
        if not (Path(path) / "config.json").is_file():
            raise ModelError(
                "the folder holds no model (no config.json)",
                field=field,
                value=path,
                remedy="give a folder in Hugging Face format, or the id of a model on the hub",
            )
        return str(Path(path).absolute())
    from transformers import AutoConfig

    try:
        AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"no such model: {str(error).strip().splitlines()[0]}",
            field=field,
            value=path,
            remedy="give a folder in Hugging Face format, or the id of a model on the hub",
        ) from None
    return path


def vocabulary_of(model: str) -> int:
    """How many tokens the model's head tells apart."""
    from transformers import AutoConfig

    size: int = AutoConfig.from_pretrained(model).get_text_config().vocab_size
    return size


def check_teacher(path: str, field: str, model: str, tokenizer: ChatTokenizer) -> None:
    """Teacher and policy are compared token by token: a token must mean the same to both. Raises ModelError, which
    names the field, where it does not."""
    find_model(path, field)
    theirs, ours = ChatTokenizer(path, field).hf.get_vocab(), tokenizer.hf.get_vocab()
    different = next((token for token, index in ours.items() if theirs.get(token) != index), None)
    if different is not None:
        raise ModelError(
            f"the teacher's tokenizer is not the model's: token {different!r} has id {ours[different]} in the model's "
            f"and {theirs.get(different)} in the teacher's",
            field=field,
            value=path,
            remedy="choose a teacher of the model's own family, with the same tokenizer",
        )
    size, needed = vocabulary_of(path), vocabulary_of(model)
    if size < needed:
        raise ModelError(
            f"the teacher has a vocabulary of {size}, and the model, of {needed}, may sample tokens beyond it",
            field=field,
            value=path,
            remedy="choose a teacher whose vocab_size is not below the model's",
        )
