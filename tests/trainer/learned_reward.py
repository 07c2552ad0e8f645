"""A reward model is trained on pairs, and then a policy against it, judged by the preference that the pairs came from.

Answers are eight letters. What is preferred is a number of vowels: the more the better up to five, the fewer beyond.
The policy that the pairs are sampled from rarely gets beyond, so that the reward model knows little of it: what learns
from its scores gets better at first, and then worse while the scores still rise (Gao et al. 2022, arXiv:2210.10760).

    python -m tests.trainer.learned_reward [folder]      three seeds, with controls
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

import numpy as np
import torch

from rayrft.algorithms import GroupFacts, build
from rayrft.data.tokenizer import ChatTokenizer
from rayrft.experience import Task
from rayrft.rewards import Transcript
from rayrft.rewards.models import ScalarModel
from rayrft.trainer.batches import TrainRow
from rayrft.trainer.model import save_hf
from rayrft.trainer.reward_model import RewardClassifier, padding_of
from tests.runtime.forks import FORKS
from tests.trainer.learning import Pupil, batches, known, row

LETTERS, VOWELS, LENGTH, BEST = "abcdefghij", "aei", 8, 5
Score = Callable[[list[str], list[list[int]]], list[float]]


@dataclass(frozen=True)
class Curve:
    """By step, on held-out prompts: what is truly preferred, and what the reward that is learnt from says."""

    steps: tuple[int, ...]
    true: tuple[float, ...]
    reward: tuple[float, ...]


class Tastes(Pupil):
    """Prompts of three letters, of which a third are held out."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.chance = np.random.default_rng(seed)
        torch.manual_seed(seed)
        prompts = [" ".join(each) for each in combinations(LETTERS, 3)]
        self.chance.shuffle(prompts)
        self.exam, self.asked = prompts[:40], prompts[40:]
        super().__init__(seed, folder, prompts, [LETTERS], longest=LENGTH + 1)

    def true(self, questions: list[str], answers: list[list[int]]) -> list[float]:
        """How good the answers are."""
        del questions  # it is a matter of answers alone
        counts = [sum(letter in VOWELS for letter in self.tokenizer.decode(ids[:LENGTH])) for ids in answers]
        return [float(count if count <= BEST else 2 * BEST - count) for count in counts]

    def demonstrate(self, steps: int = 60) -> None:
        """Imitate answers of random letters."""
        rows = []
        for _ in range(1000):
            question, letters = str(self.chance.choice(self.asked)), self.chance.choice(list(LETTERS), LENGTH)
            rows.append(row(self.prompt(question), self.answer("".join(letters)), expert=True))
        learner = self.learner("sft", steps, 2e-3, "linear")
        for batch in batches(rows, 64, steps, self.chance):
            learner.step([batch])

    def pairs(self, questions: Sequence[str], *, noise: bool) -> list[TrainRow]:
        """Pairs of own answers; with ``noise``, of which the worse one is chosen as often as Bradley and Terry say."""
        twice = [question for question in questions for _ in range(2)]
        answers = self.sample(twice)
        liked, rows = self.true(twice, answers), []
        for number in range(0, len(twice), 2):
            gap = liked[number] - liked[number + 1]
            first = self.chance.random() < 1 / (1 + np.exp(-gap)) if noise else gap > 0
            if gap or noise:
                for at, chosen in ((number, first), (number + 1, not first)):
                    rows.append(row(self.prompt(twice[at]), answers[at], expert=True, pair=number, chosen=chosen))
        return rows

    def new_scorer(self) -> RewardClassifier:
        """A reward model that begins with the policy's decoder."""
        scorer = RewardClassifier(self.model(), padding_of(str(self.folder)))
        scorer.copy_decoder(self.policy)
        return scorer

    def reward_model(self, folder: Path, steps: int = 60) -> float:
        """Train a reward model on pairs, write it to ``folder``, and return its accuracy on other pairs."""
        scorer = self.new_scorer()
        learner = self.learner("reward_model", steps, 1e-3, "linear", pieces={"center": 0.01}, scorer=scorer)
        rows = self.pairs(self.chance.choice(self.asked, 1000).tolist(), noise=True)
        sides = [rows[at : at + 2] for at in range(0, len(rows), 2)]
        for _ in range(steps):
            some = self.chance.choice(len(sides), 32, replace=False)
            learner.step([[side for place in some for side in sides[place]]])
        save_hf(scorer, ChatTokenizer(self.folder), folder, dtype=torch.float32)()
        parts, over = learner.gradient(self.pairs(self.exam * 5, noise=False))
        return float(parts.pair_accuracy / over.pairs)

    def scores_of(self, folder: Path) -> Score:
        """Return the reward ``model`` of what was written."""
        model = ScalarModel(str(folder))

        def score(questions: list[str], answers: list[list[int]]) -> list[float]:
            tasks = [Task.create("taste", question, "") for question in questions]
            texts = self.tokenizer.batch_decode(answers, skip_special_tokens=True)
            calls = [(task, Transcript.of(task, text)) for task, text in zip(tasks, texts, strict=True)]
            return [result.value for result in model.score_batch(calls)]  # type: ignore[misc]

        return score

    def untrained(self, folder: Path) -> Score:
        """Return the scores of a reward model that was not trained, and whose head is random."""
        scorer = self.new_scorer()
        with torch.no_grad():
            scorer.head.weight.normal_(std=0.1, generator=torch.Generator().manual_seed(self.seed))
        save_hf(scorer, ChatTokenizer(self.folder), folder, dtype=torch.float32)()
        return self.scores_of(folder)

    def by_grpo(self, reward: Score, steps: int, *, every: int = 5, groups: int = 12, size: int = 8) -> Curve:
        """Learn from the rewards of own answers, from the policy that there is, which is restored."""
        start = {name: weight.clone() for name, weight in self.policy.state_dict().items()}
        learner, algorithm = self.learner("grpo", steps, 3e-4), build("grpo")
        at, true, said = [], [], []
        for step in range(steps + 1):
            if step % every == 0:
                asked = self.exam * 4
                answers = self.sample(asked)
                at.append(step)
                true.append(float(np.mean(self.true(asked, answers))))
                said.append(float(np.mean(reward(asked, answers))))
            asked = [str(question) for question in self.chance.choice(self.asked, groups) for _ in range(size)]
            answers = self.sample(asked)
            rewards = torch.tensor(reward(asked, answers)).split(size)
            advantages = torch.cat([algorithm.group_advantages(each, GroupFacts()) for each in rewards]).tolist()
            rows = [row(self.prompt(question), ids) for question, ids in zip(asked, answers, strict=True)]
            each = zip(known(learner, rows), advantages, strict=True)
            learner.step([[replace(row, advantages=row.mask * np.float32(advantage)) for row, advantage in each]])
        self.policy.load_state_dict(start)
        return Curve(tuple(at), tuple(true), tuple(said))


def lesson(seed: int, folder: Path, steps: int = 40) -> tuple[float, dict[str, Curve]]:
    """Return the accuracy of the reward model on other pairs, and the curves: of learning from it, and of controls."""
    torch.set_num_threads(1)
    tastes = Tastes(seed, folder / "model")
    tastes.demonstrate()
    accuracy = tastes.reward_model(folder / "rm")
    rewards = {"learned": tastes.scores_of(folder / "rm"), "true": tastes.true}
    rewards["untrained"] = tastes.untrained(folder / "untrained")
    return accuracy, {name: tastes.by_grpo(reward, steps) for name, reward in rewards.items()}


def measure(folder: Path, seed: int) -> dict[str, float]:
    """Learn from a seed; return the figures of `rayrft reproduce`: what is truly preferred, by reward and step."""
    _, curves = lesson(seed, folder)
    points = {name: zip(curve.steps, curve.true, strict=True) for name, curve in curves.items()}
    return {f"{name} at {at}": true for name, found in points.items() for at, true in found}


def main(folder: Path, seeds: int = 3) -> None:
    """Print a line per seed and reward."""
    with FORKS.Pool(2) as pool:
        found = pool.starmap(lesson, [(seed, folder / str(seed)) for seed in range(seeds)], chunksize=1)
    for seed, (accuracy, curves) in enumerate(found):
        print(f"seed {seed}: {accuracy:.2f} of other pairs right; by steps, what is true and what the reward says")
        for name, curve in curves.items():
            points = zip(curve.steps, curve.true, curve.reward, strict=True)
            print(f"  {name}: " + ", ".join(f"{at}: {true:.2f} ({said:.2f})" for at, true, said in points))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        main(Path(sys.argv[1] if len(sys.argv) > 1 else made))
