"""Algorithms by name: what they need, what may be overridden, and how a mistake is told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import yaml

from rayrft.algorithms import Algorithm, build, presets
from rayrft.algorithms.registries import REGISTRIES
from rayrft.errors import ConfigError
from tests.conftest import ROOT
from tests.errors import about

NEEDS = {"rollouts", "expert", "pairs", "reference", "critic", "proximal", "teacher", "greedy_baseline", "turns"}
NEEDS |= {"labels", "reference_kl"}
GROUPED = "grpo dr_grpo dapo cispo sapo rloo reinforce_pp raft opmd kimi topr sppo asymre rec red_drop red_weight"


def needs(algorithm: Algorithm) -> set[str]:
    return NEEDS & algorithm.needs.keys()


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (GROUPED, {"rollouts"}),
        ("sft", {"expert"}),
        ("kto", {"expert", "labels", "reference", "reference_kl"}),
        ("mix chord chord_mu", {"rollouts", "expert"}),
        ("dpo ipo", {"pairs", "reference"}),
        ("simpo cpo orpo", {"pairs"}),
        ("ppo", {"rollouts", "critic"}),
        ("remax", {"rollouts", "greedy_baseline"}),
        ("gigpo", {"rollouts", "turns"}),
        ("distill jsd", {"rollouts", "teacher"}),
        ("gspo", {"rollouts", "proximal"}),
    ],
)
def test_presets_say_what_they_need(names: str, expected: set[str]) -> None:
    assert {name: needs(build(name)) for name in names.split()} == dict.fromkeys(names.split(), expected)


def test_an_algorithm_needs_what_its_pieces_need() -> None:
    assert needs(build("grpo", {"kl": "k3"})) == {"rollouts", "reference"}
    assert needs(build("grpo", {"kl": "k3", "kl_coef": 0})) == {"rollouts"}, "a term of weight 0 needs nothing"
    assert needs(build("grpo", {"correction": "truncated"})) == {"rollouts", "proximal"}
    assert needs(build("mix", {"mu": 0.0})) == {"rollouts"}
    assert needs(build("mix", {"mu": 1.0})) == {"expert"}
    assert build("grpo", {"kl": "k2"}).needs["reference"] == "kl 'k2'"


def test_any_piece_and_coefficient_can_be_overridden() -> None:
    constant = {"aggregation": "constant", "constant_length": 32}
    algorithm = build("grpo", {"policy_loss": "cispo", "clip_low": 0.01, **constant})
    assert (algorithm.policy_loss, algorithm.advantage) == ("cispo", "grpo")
    assert algorithm.coefficients == {"clip_low": 0.01, "constant_length": 32}
    assert "answer_length" in build("dr_grpo").needs
    for each in (build("dr_grpo", {"constant_length": 32}), build("grpo")):
        assert "answer_length" not in each.needs


def test_coefficients_of_a_preset_go_with_the_piece_that_takes_them() -> None:
    assert build("dapo").coefficients == {"clip_low": 0.2, "clip_high": 0.28}
    assert build("dapo", {"policy_loss": "reinforce"}).coefficients == {}
    assert build("dapo", {"policy_loss": "gspo"}).coefficients == {}, "they are of the same names, not the same bounds"
    assert build("dapo", {"clip_high": 0.5}).coefficients == {"clip_low": 0.2, "clip_high": 0.5}


@pytest.mark.parametrize("loss", ["gspo", "gspo_token"])
def test_a_ratio_to_the_proximal_policy_is_weighed_by_a_correction(loss: str) -> None:
    assert build("grpo", {"policy_loss": loss}).correction == "truncated"
    assert build("grpo", {"policy_loss": loss, "weight_cap": 3.0}).coefficients == {"weight_cap": 3.0}
    for named in ("none", "sequence_mask"):
        assert build("grpo", {"policy_loss": loss, "correction": named}).correction == named
    assert build("grpo").correction == "none"


@pytest.mark.parametrize("advantage", ["gigpo", "process", "gae"])
def test_gspo_token_takes_advantages_that_differ_within_an_answer(advantage: str) -> None:
    critic = {"value_loss": "squared"} if advantage == "gae" else {}
    assert build("grpo", {"policy_loss": "gspo_token", "advantage": advantage, **critic}).advantage == advantage
    assert build("gspo", {"policy_loss": "gspo_token", "kl": "k1", "kl_in": "reward"}).penalises_rewards


def test_a_piece_may_be_any_function_by_its_path() -> None:
    algorithm = build("grpo", {"policy_loss": "rayrft.algorithms.reinforce:kimi", "tau": 0.3})
    assert algorithm.piece("policy_loss").coefficients == {"tau": 0.1}  # type: ignore[union-attr]
    assert algorithm.aggregation == "sequence_mean_token_mean" and not algorithm.zero_advantage_is_noop


@pytest.mark.parametrize("path", ["kl:k3", "corrections:truncated", "advantages:remax", "advantages:gigpo"])
def test_a_piece_needs_the_same_by_its_path(path: str) -> None:
    module, name = path.split(":")
    field = module.removesuffix("s")
    by_path = build("grpo", {field: f"rayrft.algorithms.{path}"})
    assert needs(by_path) == needs(build("grpo", {field: name})) > {"rollouts"}


def test_an_advantage_by_token_is_known_as_such_by_its_path() -> None:
    algorithm = build("ppo", {"advantage": "rayrft.algorithms.values:gae", "lam": 0.9})
    assert needs(algorithm) == {"rollouts", "critic"} and algorithm.advantage_is_by_token
    with pytest.raises(ConfigError, check=about("algorithm.advantage")):
        build("ppo", {"advantage": "rayrft.algorithms.values:gea"})


@pytest.mark.parametrize("loss", ["gspo", "gspo_token", "importance_sequence", "kimi"])
def test_a_loss_of_whole_answers_is_taken_once_for_each(loss: str) -> None:
    assert build("grpo", {"policy_loss": loss}).aggregation == "sequence_mean_token_mean"
    assert build("grpo", {"policy_loss": loss, "aggregation": "sequence_mean_token_mean"}).policy_loss == loss
    for unfit in ("token_mean", "sequence_mean_token_sum", "constant"):
        with pytest.raises(ConfigError, match=rf"aggregation: would count.*'{loss}' is a loss of whole answers.*leave"):
            build("grpo", {"policy_loss": loss, "aggregation": unfit})
    assert build("gspo", {"policy_loss": "ppo"}).aggregation == "sequence_mean_token_mean", "as the preset has it"


def test_grpo_with_the_loss_of_gspo_is_gspo() -> None:
    assert replace(build("grpo", {"policy_loss": "gspo"}), name="gspo") == build("gspo")


# By preset: overrides of which the last is wrong.
MISTAKES = """
grpo | policy_loss: gpso | advantage: rlo | clip_hi: 0.3 | policy_los: ppo | kl: null | kl: [k2, k3]
grpo | tau: 0.1 | mu: 0.1 | constant_length: 8 | kl_coef: 0.1 | entropy_coef: 0.1 | kl_target: 0.1 | entropy_goal: 0.1
grpo | clip_low: 1.5 | clip_high: 0 | clip_high: .inf | clip_high: .nan | clip_low: small | clip_low: true
grpo | kl: k3, kl_coef: -1 | kl: k3, kl_target: 0 | kl: k3, kl_target: 0.1, kl_coef: 0 | kl: k3, kl_horizon: 9 | kl: k1
grpo | entropy: bonus, entropy_step: 0.1 | teacher_candidates: 4 | value_loss: clipped | normalise_advantages: "yes"
grpo | kl: k3, kl_in: lost | advantage: accept, kl: k1, kl_in: reward | advantage: none | aggregation: none
grpo | correction: [truncated, truncated] | correction: [truncated, none] | correction: [truncated, 3] | correction: []
grpo | correction: [truncated, sequence_maks] | correction: [truncated, token_mask], sequence_cap: 2.0
grpo | correction: [truncated, token_mask], weight_cap: 0 | correction: token_mask, weight_low: 2.0
grpo | correction: masked, weight_high: 1.0, weight_low: 1.0 | below_threshold: keep | normalise_by: answers
grpo | reward_components: {right: 1.0} | reward_scale: 0 | reward_high: 1.0, reward_low: 1.0 | reward_low: .inf
gdpo | reward_components: right | reward_components: {right: much} | reward_components: {1: 1.0}
gdpo | reward_components: {right: .nan} | reward_scale: 2.0 | reward_high: 2.0
sft | clip_low: 0.1 | kl: k3 | normalise_advantages: true | correction: [truncated, masked] | reward_scale: 2.0
chord_mu | mu: 0.1 | mu_decay_steps: 1.5
mix | mu_schedule: none
rec | keep_where: here
gigpo | deviation: 1 | policy_loss: gspo | policy_loss: kimi
jsd | teacher_candidates: 0 | teacher_share: 0 | teacher_share: 1.0
distill | teacher_candidates: 4 | kl: k1, kl_in: reward | normalise_advantages: true
raft | kl: k1, kl_in: reward
gspo | kl: k1, kl_in: reward
red_drop | normalise_advantages: true | normalise_by: answers, normalise_advantages: true
dpo | normalise_advantages: true | sft: nll | label_smoothing: 0.5 | chosen_coef: -1.0
ipo | distillation: reverse_kl
kto | sft: nll | desirable_weight: -1.0
ppo | normalise_by: answers | policy_loss: importance_sequence
reinforce_pp | normalise_by: answer
"""
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("grop", {}, "name"),
    ("grpo", {"advantage": "gae"}, "value_loss"),
    ("grpo", {"correction": "sequence_mask", "sequence_high": 0.9}, "sequence_low"),
    ("grpo", {"correction": ["truncated", "sequence_mask"], "sequence_high": 0.9}, "sequence_low"),
    ("kto", {"preference": "dpo"}, "unpaired"),
    ("kimi", {"advantage": "red_drop"}, "policy_loss"),
    ("kimi", {"advantage": "accept"}, "policy_loss"),
]
for _line in MISTAKES.strip().splitlines():
    _preset, *_wrong = _line.split(" | ")
    REFUSED += [(_preset, each, list(each)[-1]) for each in (yaml.safe_load("{" + text + "}") for text in _wrong)]


@pytest.mark.parametrize(("name", "overrides", "field"), REFUSED)
def test_a_mistake_names_its_key(name: str, overrides: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, check=about(f"algorithm.{field}")):
        build(name, overrides)


def test_pieces_near_to_what_is_refused_are_not() -> None:
    assert build("grpo", {"kl": "k1", "kl_coef": 0.0}).terms == frozenset(), "it weighs nothing"
    assert build("grpo", {"kl": "k1", "kl_in": "reward"}).penalises_rewards
    assert "turns" in build("gspo", {"advantage": "step_wise"}).needs, "all turns of an answer have one advantage"
    assert build("red_drop", {"kl": "k2", "entropy": "bonus"}).terms == {"kl", "entropy"}


def test_every_name_stands_in_the_readme() -> None:
    section = (ROOT / "rayrft" / "algorithms" / "README.md").read_text()
    pieces = [registry.get(name) for registries in REGISTRIES.values() for registry in registries for name in registry]
    ours = {piece.name for piece in pieces if piece.function.__module__.startswith("rayrft.")}  # not a loaded plugin's
    assert not {name for name in ours | set(presets) if f"`{name}`" not in section}


def test_weights_of_reward_components_are_named() -> None:
    algorithm = build("gdpo", {"reward_components": {"right": 1, "form": -0.5}})
    assert algorithm.reward_components == ("right", "form") and "components" in algorithm.needs
    assert build("gdpo").reward_components == () and "components" not in build("grpo").needs
    assert build("red_drop", {"normalise_advantages": True, "normalise_by": "rewards"}).normalise_advantages


def test_none_leaves_a_piece_out() -> None:
    assert build("mix", {"sft": "none"}).needs.keys() == {"rollouts"}
    assert build("grpo", {"kl": "none"}) == build("grpo")


def test_an_optional_coefficient_takes_nothing_or_a_number() -> None:
    assert build("rloo", {"dual_clip": None}).coefficients == {"dual_clip": None}
    assert build("rloo", {"dual_clip": 3.0}).coefficients == {"dual_clip": 3.0}
    with pytest.raises(ConfigError, check=about("algorithm.dual_clip", 0.9)):
        build("grpo", {"dual_clip": 0.9})


PUBLISHED = """
advantage grpo: {epsilon: 1.0e-6, std_threshold: 0.0, below_threshold: drop}  # verl
advantage gigpo: {step_weight: 1.0, discount: 0.95, deviation: true, epsilon: 1.0e-6}
advantage asymre: {baseline_shift: -0.1}
advantage gae: {gamma: 1.0, lam: 1.0, bootstrap_truncated: false}
policy_loss ppo: {clip_low: 0.2, clip_high: 0.2, dual_clip: null}
policy_loss gspo: {clip_low: 3.0e-4, clip_high: 4.0e-4}
policy_loss gspo_token: {clip_low: 3.0e-4, clip_high: 4.0e-4}
policy_loss cispo: {clip_low: 1.0, clip_high: 0.28}
policy_loss sapo: {tau_positive: 1.0, tau_negative: 1.05}
policy_loss topr: {}
policy_loss sppo: {log_clip: 0.3}
policy_loss rec: {keep_where: one_side, weigh_by_ratio: false, clip_low: 0.2, clip_high: 0.2,
  ring_low: 0.6, ring_high: 2.0}
correction truncated: {weight_cap: 2.0}  # verl
correction masked: {weight_low: 0.5, weight_high: 5.0}  # IcePop
correction sequence_mask: {sequence_low: 0.99, sequence_high: 1.01}  # SkyRL
correction sequence_truncated: {sequence_cap: 2.0, sequence_ratio: product}  # verl
correction sequence_masked: {sequence_cap: 3.0, sequence_ratio: product}  # TRL
value_loss clipped: {value_clip: 0.2}
preference dpo: {beta: 0.1, label_smoothing: 0.0}
preference dpo_by_length: {beta: 5.0, label_smoothing: 0.0}  # Tulu 3
preference simpo: {beta: 2.0, target_margin: 1.0}
preference orpo: {beta: 0.1}  # TRL
"""


def test_defaults_are_the_published_ones() -> None:
    for title, defaults in yaml.safe_load(PUBLISHED).items():
        kind, name = title.split()
        piece = next(registry for registry in REGISTRIES[kind] if name in registry).get(name)
        assert dict(piece.coefficients) == defaults, title
    for name in presets:
        algorithm = build(name)
        if algorithm.policy_loss == "ppo":  # the upper clip is higher where the paper has it
            bounds = {**algorithm.piece("policy_loss").coefficients, **algorithm.coefficients}  # type: ignore[union-attr]
            assert (bounds["clip_low"], bounds["clip_high"]) == (0.2, 0.28 if name in ("grpo", "dapo") else 0.2), name
