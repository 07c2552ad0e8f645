"""Learned reward models as rewards."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoTokenizer,
    BertForSequenceClassification,
    Qwen2ForSequenceClassification,
    Qwen2ForTokenClassification,
)

from rayrft.config.reward import RewardConfig
from rayrft.errors import ConfigError, ModelError
from rayrft.experience import Task
from rayrft.rewards import Transcript
from rayrft.rewards.models import ProcessModel, ScalarModel
from rayrft.rewards.scorer import Scorer
from tests.errors import about

pytestmark = pytest.mark.usefixtures("forked_templates")

TASK = Task.create("test", "How much is 1 + 1?", "2")
TRANSCRIPT = Transcript.of(TASK, "It is 2.")


def classifier(
    tiny_model: Path, folder: Path, kind: Any = Qwen2ForSequenceClassification, *, template: bool = True, **config: Any
) -> Path:
    """Save a classifier with weights by chance, and the tokenizer of another model."""
    torch.manual_seed(0)
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_model)
    if not template:
        tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = {"num_labels": 1, "pad_token_id": 0, "vocab_size": len(tokenizer), **sizes, **config}
    if kind is not BertForSequenceClassification:
        config["num_key_value_heads"] = 2
    kind(kind.config_class(**config)).save_pretrained(folder)
    return folder


def by_hand(folder: Path, tokens: int | None = None) -> float:
    """The output of the classifier for the conversation, or its last tokens."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template([dict(turn) for turn in TRANSCRIPT.turns], tokenize=False)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    with torch.no_grad():
        model = Qwen2ForSequenceClassification.from_pretrained(folder).eval()
        return float(model(ids if tokens is None else ids[:, -tokens:]).logits)


def test_the_reward_is_the_output_on_the_whole_conversation(tiny_model: Path, tmp_path: Path) -> None:
    folder = classifier(tiny_model, tmp_path / "rm")
    logit = by_hand(folder)
    result = ScalarModel(str(folder)).score(TASK, TRANSCRIPT)
    assert result.value == pytest.approx(logit, abs=1e-5) and result.components == {"logit": result.value}
    squashed = ScalarModel(str(folder), sigmoid=True, scale=2.0, shift=-1.0).score(TASK, TRANSCRIPT)
    assert squashed.value == pytest.approx(2 * torch.tensor(logit).sigmoid().item() - 1, abs=1e-5)
    other = ScalarModel(str(folder)).score(TASK, Transcript.of(TASK, "It is 3."))
    assert other.value != result.value
    cut = ScalarModel(str(folder), max_length=5).score(TASK, TRANSCRIPT)
    assert cut.value == pytest.approx(by_hand(folder, 5), abs=1e-5) and cut.value != result.value


@pytest.mark.parametrize("padding", [0, None])
def test_calls_together_have_the_values_that_each_has_alone(
    padding: int | None, tiny_model: Path, tmp_path: Path
) -> None:
    folder = classifier(tiny_model, tmp_path / "rm", pad_token_id=padding)
    calls = [(TASK, Transcript.of(TASK, "It is " + "cat " * count)) for count in (9, 0, 30, 2, 2, 17, 1)]
    # 30 cats alone fill what one forward may take.
    model = ScalarModel(str(folder), max_batch=8, batch_tokens=60)
    alone = [model.score(*call) for call in calls]
    assert len({each.value for each in alone}) == 6, "two of them are alike"
    assert [each.value for each in model.score_batch(calls)] == pytest.approx([each.value for each in alone], abs=1e-5)
    longer = ScalarModel(str(folder)).score_batch(calls)
    assert [each.value for each in longer] == pytest.approx([each.value for each in alone], abs=1e-5)
    assert model.max_batch == (1 if padding is None else 8)


def test_padding_is_not_seen_by_a_model_that_looks_both_ways(tiny_model: Path, tmp_path: Path) -> None:
    folder = classifier(tiny_model, tmp_path / "rm", BertForSequenceClassification)
    model, calls = ScalarModel(str(folder)), [(TASK, Transcript.of(TASK, "It is " + "cat " * n)) for n in (1, 40)]
    alone = [model.score(*call).value for call in calls]
    assert [each.value for each in model.score_batch(calls)] == pytest.approx(alone, abs=1e-5)


async def test_it_scores_in_processes_of_its_own(tiny_model: Path, tmp_path: Path) -> None:
    folder = classifier(tiny_model, tmp_path / "rm")
    scorer = Scorer(RewardConfig(name="model", options={"model": str(folder)}, workers=2, deadline_s=60), [])
    await scorer.open()
    results = await scorer.score(TASK, [TRANSCRIPT] * 4)
    await scorer.close()
    assert [each.value for each in results] == [pytest.approx(by_hand(folder), abs=1e-5)] * 4


async def test_what_gives_no_reward_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    for options, says in (
        ({"num_labels": 3}, "has 3 outputs"),
        ({"template": False}, "no chat template"),
        (None, "cannot be"),
    ):
        folder = tmp_path / says if options is None else classifier(tiny_model, tmp_path / says, **options)
        with pytest.raises(ModelError, match=says, check=about("reward.options.model")):
            ScalarModel(str(folder))
        if options is None:
            with pytest.raises(ConfigError, match="cannot be loaded", check=about("reward.name")):
                await Scorer(RewardConfig(name="model", options={"model": str(folder)}), []).open()


# Steps


def step_classifier(tiny_model: Path, folder: Path, num_labels: int = 2, positions: int = 512) -> Path:
    sizes = {"num_labels": num_labels, "max_position_embeddings": positions, "initializer_range": 0.5}
    return classifier(tiny_model, folder, Qwen2ForTokenClassification, **sizes)


def steps_by_hand(folder: Path, before: list[dict[str, str]], steps: list[str], separator: str) -> list[float]:
    """The probability of label 1 after each step, from a forward of the tokens up to there."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model = Qwen2ForTokenClassification.from_pretrained(folder).eval()
    text, found = tokenizer.apply_chat_template(before, tokenize=False, add_generation_prompt=True), []
    for step in steps:
        text += step + separator
        with torch.no_grad():
            logits = model(tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids).logits
        found.append(float(logits[0, -1].softmax(-1)[1]))
    return found


def test_a_process_model_gives_each_answer_what_its_steps_come_to(tiny_model: Path, tmp_path: Path) -> None:
    folder = step_classifier(tiny_model, tmp_path / "prm")
    asked = [dict(turn) for turn in TASK.messages]
    given = [*asked, {"role": "assistant", "content": "an example"}, {"role": "user", "content": "And now?"}]
    first, second = ["1 + 1 = 2", "so 2"], ["cat", "dog", "It is 2."]
    between = [*given, {"role": "assistant", "content": "\n".join(first)}, {"role": "user", "content": "Sure?"}]
    turns = (*between, {"role": "assistant", "content": "\n\n".join(second) + "\n"})
    transcript = Transcript(turns, given=1)
    one = steps_by_hand(folder, given, first, "\n")
    two = steps_by_hand(folder, between, second, "\n")
    assert len({*one, *two}) == 5 and min(one) != min(two)
    result = ProcessModel(str(folder)).score(TASK, transcript)
    assert result.turns == pytest.approx((min(one), min(two)), abs=1e-5)
    assert result.value == pytest.approx(min(one + two), abs=1e-5) and result.components["steps"] == 5
    assert ProcessModel(str(folder)).result_of([], [[0.9, 0.45], [0.8]]).components == {"steps": 3, "right": 1}
    assert ProcessModel(str(folder)).result_of([], [[0.9, 0.55], [0.8]]).components == {"steps": 3, "right": 3}
    assert result.steps == ()
    by_step = ProcessModel(str(folder), per="step").score(TASK, transcript)
    assert by_step.turns == () and by_step.value == result.value
    assert [step.value for step in by_step.steps] == pytest.approx(one + two, abs=1e-5)
    # A step ends with its separator, and the last one of an answer without it with the answer.
    whole = [turns[3]["content"], turns[5]["content"]]
    ended = [whole[step.turn][: step.end] for step in by_step.steps]
    assert ended == ["1 + 1 = 2\n", "1 + 1 = 2\nso 2", "cat\n", "cat\n\ndog\n", "cat\n\ndog\n\nIt is 2.\n"]
    alone = ProcessModel(str(folder), per="answer").score(TASK, transcript)
    assert (alone.value, alone.turns, alone.steps) == (result.value, (), ())
    for reduce, value in (("product", math.prod(one + two)), ("mean", sum(one + two) / 5), ("last", two[-1])):
        again = ProcessModel(str(folder), reduce=reduce).score(TASK, transcript)  # type: ignore[arg-type]
        assert again.value == pytest.approx(value, abs=1e-5)


def test_answers_of_many_steps_have_together_the_values_that_each_has_alone(tiny_model: Path, tmp_path: Path) -> None:
    folder = step_classifier(tiny_model, tmp_path / "prm", positions=120)
    model = ProcessModel(str(folder), batch_tokens=150, per="step")
    answers = ["It is 2.", "", "\n\n", "cat\n" * 7, "dog\ncat", "x" * 200, "2\n" * 30]
    calls = [(TASK, Transcript.of(TASK, answer)) for answer in answers]
    alone = [model.score(*call) for call in calls]
    together = model.score_batch(calls)
    assert [each.value for each in together[:5]] == pytest.approx([each.value for each in alone[:5]], abs=1e-5)
    assert [each.components["steps"] for each in together[:5]] == [1, 1, 1, 7, 2]
    assert [[step.end for step in each.steps] for each in together[:3]] == [[8], [0], [2]]
    assert together[5].value is None and "120 positions" in str(together[5].reason)
    assert together[6].value == pytest.approx(alone[6].value, abs=1e-5)


def test_a_process_model_of_another_form_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    folder = step_classifier(tiny_model, tmp_path / "prm", num_labels=3)
    for options, field in (
        ({"reduce": "max"}, "reduce"),
        ({"per": "word"}, "per"),
        ({"separator": ""}, "separator"),
        ({}, "model"),
    ):
        with pytest.raises(ConfigError if options else ModelError, check=about(f"reward.options.{field}")):
            ProcessModel(str(folder), **options)
