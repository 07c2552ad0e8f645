"""A small model learns by PPO and by DPO, without engines: answers are sampled by transformers.

The task is to spell a word backwards. A warm-up leaves a model that is right now and then; what is learnt from there is
measured by greedy exact match on held-out words.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import reasoning_gym
import torch
from torch import Tensor
from transformers import AutoTokenizer

from rayrft.algorithms import build
from rayrft.config.model import TinyModelConfig
from rayrft.config.stage import UpdateConfig
from rayrft.config.trainer import OptimizerConfig, TrainerConfig
from rayrft.trainer.batches import TrainRow
from rayrft.trainer.learner import Learner
from rayrft.trainer.loading import load_policy
from rayrft.trainer.optimizer import Optimizer
from rayrft.trainer.policy import Policy
from rayrft.trainer.tiny import make_tiny_model
from rayrft.trainer.value_model import Critic

CPU = torch.device("cpu")


class Pupil:
    """A small model, whose answers have up to ``longest`` tokens."""

    def __init__(self, seed: int, folder: Path, prompts: list[str], answers: list[str], longest: int) -> None:
        self.seed = seed
        self.longest = longest
        model = TinyModelConfig(layers=2, hidden_size=128, heads=4, intermediate_size=384)
        make_tiny_model(model, prompts, answers, folder, max_length=64, seed=seed)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.folder = folder
        self.policy = self.model()

    def model(self) -> Policy:
        """The model as it was at first."""
        policy = load_policy(str(self.folder))
        policy.enable_fast_paths(pack=True)
        return policy

    def learner(self, name: str, steps: int, lr: float, schedule: str = "constant", **settings: Any) -> Learner:
        update = UpdateConfig(**settings.pop("update", {}))
        config = TrainerConfig(micro_batch_tokens=2048)
        learner = Learner(self.policy, config, temperature=1.0, device=CPU, seed=self.seed)
        algorithm, critic, scorer = build(name, settings.pop("pieces", {})), None, settings.pop("scorer", None)
        if "critic" in algorithm.needs:
            critic = Critic(settings.pop("critic"))
            critic.optimizer = Optimizer(critic.parameters(), OptimizerConfig(lr=1e-3), steps)
        learner.open_stage(algorithm, OptimizerConfig(lr=lr, schedule=schedule), steps, update, critic, None, scorer)
        return learner

    def prompt(self, question: str) -> list[int]:
        messages = [{"role": "user", "content": question}]
        ids: list[int] = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        return ids

    def answer(self, text: str) -> list[int]:
        return [*self.tokenizer(text, add_special_tokens=False)["input_ids"], self.tokenizer.eos_token_id]

    @torch.no_grad()
    def sample(self, questions: list[str], *, greedy: bool = False) -> list[list[int]]:
        """An answer to each question, up to its end."""
        prompts = [self.prompt(question) for question in questions]
        width = max(map(len, prompts))
        pad = self.tokenizer.pad_token_id
        ids = torch.tensor([[pad] * (width - len(each)) + each for each in prompts])
        model = self.policy.model
        own = model.config._attn_implementation
        model.set_attn_implementation("sdpa")
        made: Tensor = model.generate(
            ids, attention_mask=ids != pad, max_new_tokens=self.longest, do_sample=not greedy, top_k=0, pad_token_id=pad
        )[:, width:]
        model.set_attn_implementation(own)
        end = self.tokenizer.eos_token_id
        return [each[: each.index(end) + 1] if end in each else each for each in made.tolist()]


class School(Pupil):
    """Words, a model that learns them, and its exam."""

    def __init__(self, seed: int, folder: Path, *, words: int = 2400) -> None:
        self.chance = np.random.default_rng(seed)
        torch.manual_seed(seed)
        made = reasoning_gym.create_dataset(
            "spell_backward", min_word_len=3, max_word_len=4, size=words, seed=seed * 100_000
        )
        items = list({item["question"]: item["answer"] for item in made}.items())
        self.chance.shuffle(items)
        self.exam, self.shown, self.asked = items[:200], items[200:-400], items[-400:]
        super().__init__(seed, folder, [q for q, _ in items], [a for _, a in items], longest=6)

    def demonstrate(self, steps: int, lr: float) -> None:
        """Imitate answers of which three in five repeat the word unreversed, so that the model holds two ways."""
        rows = []
        for question, answer in self.shown:
            shown = answer[::-1] if self.chance.random() < 0.6 else answer
            rows.append(row(self.prompt(question), self.answer(shown), expert=True))
        learner = self.learner("sft", steps, lr, "linear")
        for batch in batches(rows, 64, steps, self.chance):
            learner.step([batch])

    def score(self) -> float:
        """Share of the exam that is answered right, greedily."""
        answers = self.sample([question for question, _ in self.exam], greedy=True)
        return float(np.mean([self.right(ids, answer) for ids, (_, answer) in zip(answers, self.exam, strict=True)]))

    def right(self, ids: list[int], answer: str) -> bool:
        return ids == self.answer(answer)

    def ask(self, prompts: int, answers: int) -> list[TrainRow]:
        """Answers to words that were not shown, with their rewards; those to one word follow one another."""
        places = self.chance.choice(len(self.asked), prompts, replace=False)
        asked = [self.asked[place] for place in places for _ in range(answers)]
        made = self.sample([question for question, _ in asked])
        return [
            row(self.prompt(question), ids, reward=float(self.right(ids, answer)))
            for ids, (question, answer) in zip(made, asked, strict=True)
        ]


def by_ppo(school: School, steps: int, *, prompts: int, answers: int = 8) -> None:
    """Learn from own answers."""
    update = {"mini_batches": 2, "critic_warmup_steps": 2}
    learner = school.learner("ppo", steps, 2e-4, critic=school.model(), update=update)
    for _ in range(steps):
        sampled = known(learner, school.ask(prompts, answers))
        learner.step([sampled[0::2], sampled[1::2]])


def by_dpo(school: School, steps: int, *, prompts: int = 400, answers: int = 16) -> None:
    """Learn from pairs of own answers to the same word, one right and one wrong."""
    rows = school.ask(prompts, answers)
    pairs = []
    for number in range(0, len(rows), answers):
        group = rows[number : number + answers]
        best, worst = max(group, key=lambda each: each.reward), min(group, key=lambda each: each.reward)
        if best.reward > worst.reward:
            sides = {"expert": True, "pair": number}
            pairs.append((replace(best, **sides, chosen=True), replace(worst, **sides)))
    learner = school.learner("dpo", steps, 1e-4, pieces={"beta": 0.3})
    for _ in range(steps):
        some = school.chance.choice(len(pairs), min(32, len(pairs)), replace=False)
        learner.step([[side for place in some for side in pairs[place]]])


def lesson(seed: int, folder: Path, steps: int, prompts: int) -> dict[str, float]:
    """Scores before and after, each way from the same warm-up; PPO takes so many steps of so many prompts."""
    torch.set_num_threads(1)
    school = School(seed, folder)
    school.demonstrate(200, 2e-3)
    start = {name: weight.clone() for name, weight in school.policy.state_dict().items()}
    scores = {"start": school.score()}
    by_dpo(school, 40)
    scores["dpo"] = school.score()
    school.policy.load_state_dict(start)
    by_ppo(school, steps, prompts=prompts)
    return {**scores, "ppo": school.score()}


def row(prompt: list[int], answer: list[int], **rest: Any) -> TrainRow:
    ids = np.array([*prompt, *answer], np.int32)
    mask = np.array([0] * len(prompt) + [1] * len(answer), np.uint8)
    zeros = np.zeros(len(ids), np.float32)
    return TrainRow(ids, mask, zeros, zeros, **{"expert": False, **rest})


def known(learner: Learner, rows: list[TrainRow]) -> list[TrainRow]:
    """The rows with the log-probs that the policy gives them."""
    scores = learner.score([each.token_ids.tolist() for each in rows])
    logprobs = [np.array([0.0, *score], np.float32) for score in scores]
    return [replace(each, logprobs=each.mask * new) for each, new in zip(rows, logprobs, strict=True)]


def batches(rows: list[TrainRow], size: int, count: int, chance: np.random.Generator) -> Iterator[list[TrainRow]]:
    for _ in range(count):
        yield [rows[place] for place in chance.choice(len(rows), size, replace=False)]
