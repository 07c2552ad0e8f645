"""Samplers through random histories, against a model of what their owner knows, with restarts in between."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrft.buffer.samplers import Sampler, samplers
from rayrft.config.buffer import SamplerConfig


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


@dataclass
class Model:
    """What the owner of a sampler knows: columns of the groups it holds, in the order in which they came."""

    config: SamplerConfig
    groups: dict[int, list[float]] = field(default_factory=dict)
    step: int = 0

    def rebuilt(self, seed: int) -> Sampler:
        sampler = samplers.get(self.config.name)(self.config, seed)
        scores, versions, uses, last_steps = np.array(list(self.groups.values()) or np.zeros((0, 4))).T
        whole = [column.astype(np.int64) for column in (versions, uses, last_steps)]
        sampler.rebuild(np.array(list(self.groups), dtype=np.int64), scores, *whole, self.step)
        return sampler

    def eligible(self) -> set[int]:
        rest, most = self.config.cooldown, self.config.max_uses
        return {
            slot
            for slot, (_, _, uses, last) in self.groups.items()
            if uses < most and (uses == 0 or self.step - last > rest)
        }


CONFIGS = st.one_of(
    st.just(SamplerConfig(name="fifo")),
    st.builds(SamplerConfig, name=st.just("uniform"), max_uses=st.integers(1, 3), cooldown=st.integers(0, 3)),
    st.builds(
        SamplerConfig,
        name=st.just("priority"),
        alpha=st.sampled_from([0, 0.6, 1, 3]),
        tau=st.sampled_from([None, 0.01, 0.3, 5]),
        max_uses=st.integers(1, 4),
        cooldown=st.integers(0, 3),
        use_decay=st.sampled_from([1.0, 0.5, 1e-3]),
        beta_steps=st.integers(1, 20),
    ),
)
SCORES = st.one_of(st.just(0.0), st.floats(0, 100))


@settings(deadline=None, max_examples=150)
@given(config=CONFIGS, seed=st.integers(0, 9), data=st.data())
def test_after_any_history_a_draw_is_lawful_and_the_same_as_after_a_restart(
    config: SamplerConfig, seed: int, data: st.DataObject
) -> None:
    model, sampler = Model(config), samplers.get(config.name)(config, seed)
    for number in range(data.draw(st.integers(1, 25), label="moves")):
        held = st.lists(st.sampled_from(sorted(model.groups)), unique=True) if model.groups else st.just([])
        move = data.draw(st.sampled_from(["add", "update", "remove", "draw", "draw", "step", "restart"]))
        if move == "add":
            slots = data.draw(st.lists(st.integers(0, 20).filter(lambda s: s not in model.groups), unique=True))
            scores = data.draw(st.lists(SCORES, min_size=len(slots), max_size=len(slots)))
            versions = [max(0, model.step - slot % 5) for slot in slots]
            model.groups |= {s: [score, v, 0, -1] for s, score, v in zip(slots, scores, versions, strict=True)}
            sampler.add(ints(*slots), np.array(scores), ints(*versions))
        elif move == "update":
            slots = data.draw(held)
            scores = data.draw(st.lists(SCORES, min_size=len(slots), max_size=len(slots)))
            for slot, score in zip(slots, scores, strict=True):
                model.groups[slot][0] = score
            sampler.update(ints(*slots), np.array(scores))
        elif move == "remove":
            slots = data.draw(held)
            for slot in slots:
                del model.groups[slot]
            sampler.remove(ints(*slots))
        elif move == "step":
            model.step += data.draw(st.integers(1, 400))
        elif move == "restart":
            sampler = model.rebuilt(seed)
        else:
            lawful = model.eligible()
            assert sampler.eligible(model.step) == len(lawful)
            count = data.draw(st.integers(1, len(lawful) + 1), label="count")
            draw, again = (each.draw(count, model.step, number) for each in (sampler, model.rebuilt(seed)))
            if count > len(lawful):
                assert draw is None and again is None
                continue
            assert draw is not None and again is not None
            assert draw.slots.tolist() == again.slots.tolist()
            assert draw.weights.tolist() == again.weights.tolist()
            assert len(set(draw.slots.tolist())) == count
            assert set(draw.slots.tolist()) <= lawful
            for slot in draw.slots.tolist():
                model.groups[slot][2:] = [model.groups[slot][2] + 1, model.step]
            uses = [int(model.groups[slot][2]) for slot in draw.slots.tolist()]
            sampler.used(draw.slots, ints(*uses), model.step)
