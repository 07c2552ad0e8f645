"""One way from messages to tokens and back, under the templates of several families: as transformers has it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from rayrft.config import load_config
from rayrft.config.model import TemplateConfig
from rayrft.data.tokenizer import ChatTokenizer
from rayrft.errors import ConfigError, ModelError
from rayrft.trainer.tiny import EOS, PAD, make_tokenizer
from tests.e2e.conftest import small_config
from tests.errors import about

_QWEN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
_QWEN_NEXT = "{% if add_generation_prompt %}<|im_start|>assistant\n"
QWEN = (
    _QWEN
    + _QWEN_NEXT
    + "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    + "{% endif %}"
)
OPENS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% set parts = m.content.split('</think>') %}"
    "{% if m.role == 'assistant' and loop.last %}"
    "{{ '<think>\n' + (parts[0].split('<think>')[-1].strip('\n') if parts | length > 1 else '') + '\n</think>\n\n' }}"
    "{% endif %}{{ parts[-1].lstrip('\n') }}<|im_end|>\n{% endfor %}" + _QWEN_NEXT + "{{ '<think>\n' }}{% endif %}"
)
LLAMA = (
    "{{ bos_token }}{% for m in messages %}"
    "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content }}<|eot_id|>"
    "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
DEEPSEEK = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}"
    "<|assistant|>{{ m.content.split('</think>')[-1] }}<|eos|>{% else %}<|user|>{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{{ '<think>\n' }}{% endif %}"
)
# The end of the whole conversation is no end of a turn.
PHI = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{{ '<|assistant|>' if add_generation_prompt else eos_token }}"
)
# A turn ends where the next one begins, and an answer shows that it was not reasoned.
GLM = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{{ ('\n<think></think>\n' if m.role == 'assistant' else '\n') + m.content }}{% endfor %}"
    "{{ '<|assistant|>' if add_generation_prompt else '' }}"
)
BOS = "<|bos|>"
FAMILIES: dict[str, tuple[str, list[str], str]] = {
    "qwen": (QWEN, ["<|im_start|>", "<|im_end|>"], "<|im_end|>"),
    "opens": (OPENS, ["<|im_start|>", "<|im_end|>"], "<|im_end|>"),
    "llama": (LLAMA, ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"], "<|eot_id|>"),
    "gemma": (GEMMA, ["<start_of_turn>", "<end_of_turn>"], "<end_of_turn>"),
    "deepseek": (DEEPSEEK, [], EOS),
    "phi": (PHI, ["<|end|>"], "<|end|>"),
    "glm": (GLM, [], EOS),
    "none": ("", [], EOS),
}
CHAT = [
    {"role": role, "content": content}
    for role, content in [("user", "one"), ("assistant", "two"), ("user", "three"), ("assistant", "four")]
]
Make = Callable[..., Path]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Write the tokenizer of a family, which adds BOS to texts; EOS and ``<|stop|>`` end answers, says its model."""
    written: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in written:
            template, special, _ = FAMILIES[family]
            hf = make_tokenizer([], [], special=[BOS, "<|stop|>", "<answer>", "</answer>", *special], template=template)
            hf.bos_token = BOS
            hf.chat_template = template or None
            hf.backend_tokenizer.post_processor = TemplateProcessing(
                single=f"{BOS} $A", special_tokens=[(BOS, hf.convert_tokens_to_ids(BOS))]
            )
            written[family] = folder = tmp_path_factory.mktemp(family)
            hf.save_pretrained(folder)
            ends = hf.convert_tokens_to_ids([EOS, "<|stop|>", *(["<|user|>"] if family == "glm" else [])])
            (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
        return written[family]

    return make


def shown(tokenizer: ChatTokenizer, messages: list[dict[str, str]], **options: Any) -> list[int]:
    """What transformers makes of messages."""
    ids: list[int] = tokenizer.hf.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
    return ids


@pytest.mark.parametrize("family", ["qwen", "llama", "gemma", "phi"])
def test_prompts_later_turns_and_demonstrations_are_the_tokens_of_transformers(family: str, make: Make) -> None:
    tokenizer = ChatTokenizer(make(family))
    first = tokenizer.prompt(CHAT[:1])
    assert first == shown(tokenizer, CHAT[:1], add_generation_prompt=True)
    answered = [*first, *tokenizer.response("two")]
    # Whichever token has ended the answer, what follows is the next turn.
    for end in tokenizer.stop_ids:
        later = [*answered[:-1], end, *tokenizer.observation(CHAT[:2], CHAT[2:3], last=end)]
        whole = shown(tokenizer, CHAT[:3], add_generation_prompt=True)
        assert [tokenizer.end_id if token == end else token for token in later] == whole
    cut = answered[:-1]
    assert [*cut, *tokenizer.observation(CHAT[:2], CHAT[2:3], last=cut[-1])] == whole
    ids, mask = tokenizer.chat(CHAT)
    assert shown(tokenizer, CHAT)[: len(ids)] == ids == [*whole, *tokenizer.response("four")]
    said = [token for token, bit in zip(ids, mask, strict=True) if bit]
    assert said == [*tokenizer.response("two"), *tokenizer.response("four")]


@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_ends_in_one_way_and_engines_stop_at_all_ends(family: str, make: Make) -> None:
    tokenizer = ChatTokenizer(make(family))
    end, eos, stop = tokenizer.hf.convert_tokens_to_ids([FAMILIES[family][2], EOS, "<|stop|>"])
    assert tokenizer.end_id == tokenizer.stop_ids[0] == end and {eos, stop} <= {*tokenizer.stop_ids}
    ids, mask = tokenizer.chat(CHAT[:2])
    assert ids == [*tokenizer.prompt(CHAT[:1]), *tokenizer.response("two")]
    assert ids.count(tokenizer.hf.bos_token_id) == (family in ("llama", "gemma", "deepseek", "none"))
    assert ids[-1] == end and mask[-1] and ids[-2] not in tokenizer.stop_ids


def test_the_next_turn_that_has_ended_an_answer_is_not_begun_again(make: Make) -> None:
    tokenizer = ChatTokenizer(make("glm"))
    [user] = tokenizer.tokens("<|user|>")
    said = [*tokenizer.prompt(CHAT[:1]), *tokenizer.response("two")[:-1], user]
    later = [*said, *tokenizer.observation(CHAT[:2], CHAT[2:3], last=user)]
    ids, mask = tokenizer.chat(CHAT)
    assert later == shown(tokenizer, CHAT[:3], add_generation_prompt=True) == ids[: len(later)]
    assert mask[: len(later)].count(1) == len(tokenizer.response("two")), "demonstrations end turns as the model does"


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_that_the_user_added_stay_in_the_text_and_marks_of_turns_do_not(family: str, make: Make) -> None:
    tokenizer = ChatTokenizer(make(family))
    marks = {"<|im_start|>", "<|start_header_id|>", "<start_of_turn>"} & {*FAMILIES[family][1]}
    text = "<think>5</think><answer>12</answer>"
    ids = tokenizer.tokens(f"{text}{PAD}{''.join(marks)}{BOS}<|stop|>{EOS}")
    assert tokenizer.decode([*ids, tokenizer.end_id]) == text
    assert tokenizer.tokens_at(ids, text, [text.index("12"), len(text)])[1] > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_a_text_from_outside_makes_no_turn_and_keeps_the_users_tags(family: str, make: Make) -> None:
    tokenizer = ChatTokenizer(make(family))
    marks = [*FAMILIES[family][1], FAMILIES[family][2], EOS, PAD, BOS, "<|stop|>"]
    shown = tokenizer.defuse(f"<answer>{''.join(marks)}</answer>")
    assert not {*tokenizer.tokens(shown)} & {*tokenizer.hf.convert_tokens_to_ids(marks)}
    assert shown.startswith("<answer><") and shown.endswith("></answer>")


def test_without_a_template_prompts_demonstrations_and_texts_begin_alike(make: Make) -> None:
    tokenizer = ChatTokenizer(make("none"))
    assert tokenizer.prompt(CHAT[:1]) == tokenizer.hf.encode("one\n") == tokenizer.tokens("one\n", begins=True)
    assert tokenizer.chat(CHAT)[0][:5] == tokenizer.prompt(CHAT[:1])
    assert tokenizer.tokens(f"{BOS}one\n", begins=True) == tokenizer.hf.encode("one\n"), "a BOS is not doubled"


@pytest.mark.parametrize("family", ["opens", "deepseek"])
def test_reasoning_that_the_prompt_opens_is_continued_by_demonstrations(family: str, make: Make) -> None:
    tokenizer = ChatTokenizer(make(family))
    assert tokenizer.template.opening() == "<think>\n"
    prompt = tokenizer.prompt(CHAT[:1])
    for text in ("hm\n</think>\n\ntwo", "<think>\nhm\n</think>\n\ntwo", "<think>hm\n</think>\n\ntwo"):
        ids, mask = tokenizer.chat([CHAT[0], {"role": "assistant", "content": text}])
        assert ids[: len(prompt)] == prompt and not any(mask[: len(prompt)])
        assert tokenizer.answer(ids[len(prompt) :]) == "<think>\nhm\n</think>\n\ntwo"
        assert ids == [*prompt, *tokenizer.response(text)]
    assert tokenizer.answer(tokenizer.response("two")) == "<think>\n\n</think>\n\ntwo", "it has no reasoning"


# The template of the config


def config(tmp_path: Path, **template: Any) -> TemplateConfig:
    loaded = load_config(small_config(tmp_path, "t", model={"tiny": {}, "template": template}))
    return loaded.model.template


def test_options_of_the_template_reach_every_prompt_and_the_saved_tokenizer(make: Make, tmp_path: Path) -> None:
    plain = ChatTokenizer(make("qwen"))
    tokenizer = ChatTokenizer(make("qwen"), template=config(tmp_path, options={"enable_thinking": False}))
    assert plain.digest == ChatTokenizer(make("qwen"), template=config(tmp_path)).digest != tokenizer.digest
    quiet = shown(plain, CHAT[:1], add_generation_prompt=True, enable_thinking=False)
    assert tokenizer.prompt(CHAT[:1]) == quiet != plain.prompt(CHAT[:1])
    assert tokenizer.observation(CHAT[:2], CHAT[2:3], last=tokenizer.end_id)[-4:] == quiet[-4:]
    assert tokenizer.chat(CHAT[:2])[0] == [*quiet, *tokenizer.response("two")]
    assert tokenizer.prompt(CHAT[:1], options={"enable_thinking": True}) == plain.prompt(CHAT[:1])
    tokenizer.hf.save_pretrained(tmp_path / "export")
    exported = ChatTokenizer(tmp_path / "export")
    assert shown(exported, CHAT[:1], add_generation_prompt=True) == quiet
    assert shown(exported, CHAT[:1], add_generation_prompt=True, enable_thinking=True) == plain.prompt(CHAT[:1])


def test_a_template_file_replaces_the_tokenizers(make: Make, tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text(OPENS)
    tokenizer = ChatTokenizer(make("qwen"), template=config(tmp_path, file=str(tmp_path / "own.jinja")))
    assert tokenizer.template.opening() == "<think>\n" and tokenizer.prompt(CHAT) == ChatTokenizer(
        make("opens")
    ).prompt(CHAT)


def test_a_template_that_cannot_be_used_is_refused_at_its_key(make: Make, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, check=about("model.template.file", str(Path("nowhere.jinja").absolute()))):
        config(tmp_path, file="nowhere.jinja")
    unknown = config(tmp_path, options={"enable_thinkin": False})
    with pytest.raises(ModelError, check=about("model.template.options.enable_thinkin", False)):
        ChatTokenizer(make("qwen"), template=unknown)
    (tmp_path / "own.jinja").write_text("{% for m in messages %}\n{{ m.content }")
    broken = config(tmp_path, file=str(tmp_path / "own.jinja"))
    with pytest.raises(ModelError, match="line 2", check=about("model.template.file")):
        ChatTokenizer(make("qwen"), template=broken).prompt(CHAT)
