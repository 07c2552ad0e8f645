"""An application that makes its client when it is imported, as many do."""

from __future__ import annotations

import os

import openai

client = openai.OpenAI()
asked = 0


def main(question: str) -> float:
    global asked
    asked += 1
    client.completions.create(model="m", prompt=f"{question} {asked}")
    return float(os.getpid())
