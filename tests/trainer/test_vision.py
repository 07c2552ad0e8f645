"""Rows with images: the policy gives the log-probs of the model that it wraps, whatever else is in the batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rayrft.data.tokenizer import ChatTokenizer
from rayrft.errors import ModelError
from rayrft.experience import Task
from rayrft.trainer.batches import TrainRow
from rayrft.trainer.loading import load_policy
from rayrft.trainer.policy import Policy, scored_batch
from rayrft.trainer.value_model import Critic
from tests.algorithms.flat import token_logprobs
from tests.trainer.learners import gradient, make_learner
from tests.trainer.ranks import on_ranks

Row = tuple[torch.Tensor, tuple[str, ...]]


def make(folder: Path) -> Policy:
    policy = load_policy(str(folder))
    chance = torch.Generator().manual_seed(0)
    with torch.no_grad():  # larger than at the start of training, so that what an image shows can be seen
        for parameter in policy.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2, generator=chance)
    policy.enable_fast_paths(pack=True)
    return policy


def make_rows(folder: Path, tasks: list[Task]) -> list[Row]:
    """One image, none, two, and none again but for a placeholder that stands for itself."""
    tokenizer = ChatTokenizer(folder)
    ask = tasks[0].messages
    prompts = [
        (ask, tasks[0].images),
        (ask, ()),
        ([{"role": "user", "content": "<image> or <image>"}], (*tasks[1].images, *tasks[2].images)),
    ]
    rows = [
        (torch.tensor(tokenizer.prompt(messages, images) + tokenizer.response("green")), images)
        for messages, images in prompts
    ]
    said = torch.cat([rows[1][0][:6], torch.tensor([tokenizer.images.token_id]), rows[1][0][6:]])
    return [*rows, (said, ())]


def by_the_model_itself(policy: Policy, row: Row, processor: Any) -> torch.Tensor:
    """As transformers alone computes it."""
    ids, images = row[0][None], [processor.load(path) for path in row[1]]
    inputs: dict[str, Any] = {}
    if images:
        inputs = dict(processor.processor.image_processor(images=images, return_tensors="pt"))
        inputs["mm_token_type_ids"] = (ids == processor.token_id).int()
    return token_logprobs(policy.model(input_ids=ids, **inputs).logits, ids, temperature=0.7)[0][0]


@pytest.mark.parametrize("chunks_head", [True, False])
def test_rows_get_the_models_own_log_probs(tiny_vision_model: Path, squares: list[Task], chunks_head: bool) -> None:
    policy, rows = make(tiny_vision_model), make_rows(tiny_vision_model, squares)
    assert not policy.packs and policy.chunks_head
    policy.chunks_head = chunks_head
    for some in (rows, rows[::-1], rows[1:2], [rows[3], rows[1]]):
        expected = torch.cat([by_the_model_itself(policy, row, policy.images) for row in some])
        batch = scored_batch([ids for ids, _ in some], [images for _, images in some])
        torch.testing.assert_close(policy.output(batch, temperature=0.7).logprobs, expected, atol=1e-5, rtol=1e-4)


def test_a_placeholder_in_an_answer_is_a_token_like_any_other(tiny_vision_model: Path, squares: list[Task]) -> None:
    policy, (ids, images) = make(tiny_vision_model), make_rows(tiny_vision_model, squares)[0]
    assert policy.images is not None
    said = torch.cat([ids, torch.tensor([policy.images.token_id, 7])])
    # By the cache: after the prompt transformers takes every token for what it is.
    patches = policy.images.read(images[0])
    kinds = (ids == policy.images.token_id).int()[None]
    past = policy.model(
        input_ids=ids[None], pixel_values=patches.values, image_grid_thw=patches.grid[None], mm_token_type_ids=kinds
    )
    rest = policy.model(input_ids=said[None, -2:], past_key_values=past.past_key_values)
    expected = rest.logits[0, 0].log_softmax(-1)[7]
    found = policy.output(scored_batch([said], [images]), temperature=1.0).logprobs[-1]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_a_text_model_refuses_a_row_with_images(tiny_model: Path, squares: list[Task]) -> None:
    batch = scored_batch([torch.arange(5)], [squares[0].images])
    with pytest.raises(ModelError, match=r"a row has an image, but the model takes none .*square-00000"):
        load_policy(str(tiny_model)).output(batch, temperature=1.0)


def train_rows(folder: Path, tasks: list[Task]) -> list[TrainRow]:
    rows = []
    for number, (ids, images) in enumerate(make_rows(folder, tasks)):
        mask = np.zeros(len(ids), dtype=np.uint8)
        mask[-6:] = 1
        each = mask.astype(np.float32)
        expert, advantages = number == 0, each * (-1) ** number
        rows.append(TrainRow(ids.numpy().astype(np.int32), mask, -3 * each, advantages, expert, images=images))
    return rows


def step_gradient(policy: Policy, rows: list[TrainRow], tokens: int, *, sharded: bool = False) -> torch.Tensor:
    learner = make_learner("mix", {"mu": 0.4}, policy=policy, tokens=tokens, sharded=sharded)
    found = gradient(learner, rows)[1]
    assert all(each.grad is not None for each in policy.parameters()), "every rank must reduce the same gradients"
    return found


def on_rank(folder: Path, tasks: list[Task]) -> torch.Tensor:
    """One rank has the images, and the other has none."""
    rank = torch.distributed.get_rank()
    rows = [row for row in train_rows(folder, tasks) if bool(row.images) == (rank == 0)]
    return step_gradient(make(folder), rows, 30, sharded=True)


def test_split_and_ranks_without_images_change_no_gradient(tiny_vision_model: Path, squares: list[Task]) -> None:
    rows = train_rows(tiny_vision_model, squares)
    whole = step_gradient(make(tiny_vision_model), rows, 10_000)
    assert whole.norm() > 0.1
    torch.testing.assert_close(step_gradient(make(tiny_vision_model), rows[::-1], 1), whole, atol=1e-5, rtol=1e-4)
    ranks = on_ranks(2, on_rank, tiny_vision_model, squares)
    torch.testing.assert_close(ranks, whole, atol=1e-5, rtol=1e-4)


def test_policy_and_critic_see_what_an_image_shows(tiny_vision_model: Path, squares: list[Task]) -> None:
    policy, (ids, images) = make(tiny_vision_model), make_rows(tiny_vision_model, squares)[0]
    critic = Critic(policy)
    torch.nn.init.normal_(critic.head.weight)
    shown = [scored_batch([ids], [seen]) for seen in (images, squares[5].images)]
    said = [policy.output(each, temperature=1.0).logprobs for each in shown]
    valued = [critic(each)[0] for each in shown]
    assert (said[0] - said[1]).abs().max() > 1e-3 and (valued[0] - valued[1]).abs().max() > 1e-2
