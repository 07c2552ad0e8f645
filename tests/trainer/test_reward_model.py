"""A reward model is trained on pairs by the same steps as a policy, and is a classifier of transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rayrft.config.demonstrations import DemonstrationsConfig
from rayrft.config.trainer import LoraConfig
from rayrft.data.demonstrations import RowEncoder
from rayrft.data.tokenizer import ChatTokenizer
from rayrft.errors import ModelError
from rayrft.experience import Experience, Task
from rayrft.rewards import Transcript
from rayrft.rewards.models import ScalarModel
from rayrft.trainer.batches import TrainRow, empty_batch, micro_batches
from rayrft.trainer.dcp import load_weights
from rayrft.trainer.loading import load_policy
from rayrft.trainer.lora import Lora
from rayrft.trainer.model import save_hf
from rayrft.trainer.reward_model import RewardClassifier, padding_of
from tests.errors import about
from tests.trainer.learners import CPU, flat, make_learner, make_model, mine, move, pairs, weights, write
from tests.trainer.ranks import on_ranks


def test_a_step_is_that_of_the_loss_by_hand_and_says_which_pairs_are_right() -> None:
    learner, rows = make_learner("reward_model"), pairs()
    policy = flat(learner.policy.parameters())
    first = learner.step([rows]).metrics
    # The head is zero at first: all scores are 0, and so is the gradient of the decoder.
    assert first.loss == first.preference_loss == pytest.approx(np.log(2), abs=1e-6)
    assert (first.pair_accuracy, first.pair_margin, first.pair_score) == (0.0, 0.0, 0.0)
    far = make_learner("reward_model").step([[replace(row, margin=8.0) for row in rows]])
    assert far.metrics.loss == pytest.approx(np.logaddexp(0, 8.0), abs=1e-5)
    for _ in range(8):
        last = learner.step([rows]).metrics
    assert last.preference_loss < 0.3 and last.pair_accuracy == 1.0 and last.pair_margin > 1.0
    assert last.policy_tokens == last.expert_tokens == 0 and torch.equal(flat(learner.policy.parameters()), policy)
    with torch.no_grad():
        assert learner.reward_model is not None
        [batch] = learner.make_micro_batches([rows])
        scores = torch.cat([learner.reward_model(micro).view(-1, 2) for micro in batch])
    again = learner.step([rows]).metrics
    gaps = (scores[:, 0] - scores[:, 1]).abs()
    assert again.pair_margin == pytest.approx(gaps.mean().item(), abs=1e-5)
    assert again.pair_score == pytest.approx(scores.mean().item(), abs=1e-5)


def _rank_and_save(folder: Path) -> Any:
    learner = make_learner("reward_model", sharded=True)
    for _ in range(3):
        learner.step([mine(pairs())])
    ranked = learner.rank_pairs([] if dist.get_rank() else pairs()[:6])
    at_save = weights(learner)
    assert write(learner, folder, mine(pairs())) == [None]
    return ranked, at_save


def test_a_ranking_is_over_all_ranks_and_a_checkpoint_is_read_for_policy_and_reward_model_apart(tmp_path: Path) -> None:
    ranked, at_save = on_ranks(2, _rank_and_save, tmp_path)
    alone = make_learner("reward_model")
    for _ in range(3):
        alone.step([pairs()])
    expected = alone.rank_pairs(pairs()[:6])  # of two ranks one has no pair
    assert (ranked.pairs, ranked.right) == (expected.pairs, expected.right) == (3, expected.right)
    assert ranked.margin == pytest.approx(expected.margin, abs=1e-4) and ranked.margin != 0
    # The policy is for the next stage, the reward model for export.
    policy, scorer = make_model(), RewardClassifier(make_model(), padding=None)
    before = flat(policy.parameters())
    load_weights(tmp_path, scorer)
    load_weights(tmp_path, policy)
    assert torch.equal(flat(policy.parameters()), before)
    torch.testing.assert_close(flat(scorer.parameters()), at_save)


CHAT = [
    {"role": "user", "content": "What is 1 + 1?"},
    {"role": "assistant", "content": "2 of course"},
    {"role": "user", "content": "and 2 + 2?"},
    {"role": "assistant", "content": "it is 4"},
]


def encoded(folder: Path, chat: list[dict[str, str]]) -> Experience:
    """The chosen row of a pair, as a stage that trains a reward model reads it."""
    encoder = RowEncoder("gold", DemonstrationsConfig(path=Path("x")), ChatTokenizer(folder), 1000, set(), whole=True)
    other = [*chat[:-1], {"role": "assistant", "content": "no"}]
    [[chosen, _]] = encoder.encode([(1, {"chosen": chat, "rejected": other})])[0].values()
    return chosen


def with_template(model: Path, folder: Path, case: str) -> Path:
    """A copy of the model whose tokenizer has another template or padding token."""
    policy = load_policy(str(model))
    save_hf(policy, ChatTokenizer(model), folder, dtype=torch.float32)()
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    if case == "ends with a newline":
        tokenizer.chat_template = tokenizer.chat_template.replace("{% endfor %}", "{{ '\\n' }}{% endfor %}")
    if case == "pads with its end":
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("case", ["plain", "ends with a newline", "pads with its end"])
def test_what_is_trained_is_written_and_scores_alike(tiny_model: Path, tmp_path: Path, case: str, lora: bool) -> None:
    model = with_template(tiny_model, tmp_path / "model", case)
    policy = load_policy(str(model))
    assert policy.enable_fast_paths(pack=True) is None
    if lora:
        settings = LoraConfig(rank=4)
        policy.lora = Lora(policy.model, settings, origin=str(model), compute=torch.float32, seed=0)
    scorer = RewardClassifier(policy, padding_of(str(model)))
    move(scorer, 0.4)
    save_hf(scorer, ChatTokenizer(model), tmp_path / "rm", dtype=torch.float32)()

    rows = [encoded(model, CHAT), encoded(model, CHAT[:2])]
    trained = []
    for row in rows:
        zeros = np.zeros(len(row.token_ids), np.float32)
        trained.append(TrainRow(row.token_ids, row.action_mask, zeros, zeros, expert=True))
    [batch] = micro_batches(trained, 1000, CPU)
    found = dict(zip(batch.lengths, scorer(batch).tolist(), strict=True))
    expected = [found[len(row.token_ids)] for row in rows]
    assert abs(expected[0] - expected[1]) > 1e-3

    reward = ScalarModel(str(tmp_path / "rm"))
    for value, chat in zip(expected, (CHAT, CHAT[:2]), strict=True):
        task = Task.create("test", chat[-2]["content"], "")
        assert reward.score(task, Transcript(tuple(chat))).value == pytest.approx(value, abs=1e-5)
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm").eval()
    padding = classifier.config.pad_token_id
    ids = torch.full((2, max(len(row.token_ids) for row in rows)), padding)
    for number, row in enumerate(rows):
        ids[number, : len(row.token_ids)] = torch.tensor(row.token_ids)
    with torch.no_grad():
        logits = classifier(ids, attention_mask=ids != padding if case != "pads with its end" else None).logits
    assert logits.flatten().tolist() == pytest.approx(expected, abs=1e-5)


def test_a_row_of_a_reward_model_is_what_the_template_writes_to_its_end(tiny_model: Path, tmp_path: Path) -> None:
    model = with_template(tiny_model, tmp_path / "model", "ends with a newline")
    tokenizer, row = ChatTokenizer(model), encoded(model, CHAT)
    ids = tokenizer.hf.apply_chat_template(CHAT, return_dict=True)["input_ids"]
    assert row.token_ids.tolist() == ids != tokenizer.chat(CHAT)[0]
    assert tokenizer.hf.decode(row.token_ids[row.action_mask == 1]).startswith("it is 4")
    tokenizer.hf.chat_template = None
    with pytest.raises(ModelError, match="no chat template"):
        tokenizer.whole(CHAT)


def test_padding_alone_and_no_rows_give_a_score_without_an_error() -> None:
    scorer = RewardClassifier(make_model(), padding=0)
    assert scorer(empty_batch(CPU)).shape == (1,)


def test_a_model_without_a_classifier_is_refused() -> None:
    policy = make_model()
    policy.model.config = type("Odd", (type(policy.model.config),), {})()
    with pytest.raises(ModelError, match="no sequence classifier", check=about("model.path")):
        RewardClassifier(policy, padding=None)


@pytest.mark.parametrize("name", ["reward_model", "dpo"])
def test_held_out_pairs_are_ranked_as_a_step_would_and_nothing_is_learnt(name: str) -> None:
    learner, rows = make_learner(name), pairs()
    for _ in range(3):
        learner.step([rows])
    before = weights(learner)
    found = learner.rank_pairs(rows)
    assert torch.equal(weights(learner), before) and learner.optimizer.updates == 3
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in learner.trained.parameters())
    step = learner.step([rows]).metrics
    assert found.pairs == 6 and found.right / 6 == pytest.approx(step.pair_accuracy) and found.right > 3
    assert found.margin == pytest.approx(step.pair_margin, abs=1e-5) and found.margin > 0
    # The other way round, what was right is wrong.
    turned = [replace(row, chosen=not row.chosen) for row in rows]
    before_turn = learner.rank_pairs(rows)
    after_turn = learner.rank_pairs(turned)
    assert after_turn.right == 6 - before_turn.right
    assert after_turn.margin == pytest.approx(-before_turn.margin, abs=1e-5)
