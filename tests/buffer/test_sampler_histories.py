"""Samplers through random histories, against a model of the groups, with restarts in between."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrft.buffer.groups import GroupStatus, GroupTable
from rayrft.buffer.samplers import draw, eligible, samplers
from rayrft.buffer.schedule import Draw
from rayrft.config.buffer import SamplerConfig
from tests.buffer.rows import stored_group


@dataclass
class Model:
    """Uses and last step of the groups, by slot."""

    config: SamplerConfig
    groups: dict[int, tuple[int, int]] = field(default_factory=dict)
    step: int = 0

    def eligible(self) -> set[int]:
        rest, most = self.config.cooldown, self.config.max_uses
        return {
            slot for slot, (uses, last) in self.groups.items() if uses < most and (uses == 0 or self.step - last > rest)
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
    model, table, arrivals = Model(config), GroupTable(), 0

    def drawn(groups: GroupTable, count: int, number: int) -> Draw | None:
        rng = np.random.default_rng([seed, number])
        return draw(samplers.get(config.name), groups, config, count, model.step, rng)

    for number in range(data.draw(st.integers(1, 25), label="moves")):
        held = st.lists(st.sampled_from(sorted(model.groups)), unique=True) if model.groups else st.just([])
        move = data.draw(st.sampled_from(["add", "update", "remove", "forget", "draw", "draw", "step", "restart"]))
        if move == "add":
            for score in data.draw(st.lists(SCORES, max_size=9)):
                group = stored_group(arrivals, score=score, version=max(0, model.step - arrivals % 5))
                model.groups[table.add(group, 0, arrivals)] = (0, -1)
                arrivals += 1
        elif move == "update":
            for slot in data.draw(held):
                table.score[slot] = data.draw(SCORES)
        elif move in ("remove", "forget"):
            for slot in (gone := data.draw(held)):
                del model.groups[slot]
                table.set_status(slot, GroupStatus.DROPPED)
            if move == "forget":
                table.forget(np.array(gone, np.int64))
        elif move == "step":
            model.step += data.draw(st.integers(1, 400))
        elif move == "restart":
            table = GroupTable.from_table(table.to_table())
        else:
            lawful = model.eligible()
            assert np.flatnonzero(eligible(table, config, model.step)).tolist() == sorted(lawful)
            count = data.draw(st.integers(1, len(lawful) + 1), label="count")
            first, again = (drawn(groups, count, number) for groups in (table, GroupTable.from_table(table.to_table())))
            if count > len(lawful):
                assert first is None and again is None
                continue
            assert first is not None and again is not None
            assert first.slots.tolist() == again.slots.tolist()
            assert first.weights.tolist() == again.weights.tolist()
            assert len(set(first.slots.tolist())) == count
            assert set(first.slots.tolist()) <= lawful
            for slot in first.slots.tolist():
                model.groups[slot] = table.uses[slot], table.last_step[slot] = table.uses[slot] + 1, model.step
