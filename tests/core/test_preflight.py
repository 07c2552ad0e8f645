"""What a run is started with."""

from __future__ import annotations

from pathlib import Path

from rayrft.core.preflight import choose_probe
from rayrft.data.tokenizer import ChatTokenizer
from rayrft.experience import Task


def test_the_probe_is_of_sequences_that_leave_an_engine_room_for_a_token(tiny_model: Path) -> None:
    tokenizer = ChatTokenizer(str(tiny_model))
    tasks = [Task.create("test", f"Spell this word backward: {'cat' * times}", "tac" * times) for times in (4, 1, 2, 3)]
    lengths = [len(tokenizer.prompt(task.messages) + tokenizer.response(task.answer)) for task in tasks]
    chosen = choose_probe(tasks, tokenizer, max_length=lengths[3])
    assert [row.task_id for row in chosen] == [tasks[1].id, tasks[2].id]
    assert len(choose_probe(tasks * 3, tokenizer, max_length=1000)) == 8
