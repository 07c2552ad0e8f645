"""What evaluation harnesses find at an endpoint, as JSON: run in an environment that has them."""

from __future__ import annotations

import json
import sys
from typing import Any

PAIRS = [("Spell this word backward: cat", " tac"), ("hello", " world"), ("", "abc"), ("one two", " three"), ("x", "y")]
LONG = "Spell this word backward. " * 4


def lm_eval(url: str, model: str) -> list[Any]:
    """Log-likelihoods and greedy answers, of the endpoint and of transformers."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    def ask(lm: Any) -> Any:
        until = {"until": ["\n"], "max_gen_toks": 8, "temperature": 0}
        return {
            "pairs": lm.loglikelihood([Instance("loglikelihood", {}, pair, n) for n, pair in enumerate(PAIRS)]),
            "rolling": lm.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (LONG,), 0)]),
            "said": lm.generate_until(
                [Instance("generate_until", {}, (text, until), n) for n, (text, _) in enumerate(PAIRS) if text]
            ),
        }

    options = {"tokenizer": model, "batch_size": 2, "num_concurrent": 2, "max_length": 256}
    ours = LocalCompletionsAPI(base_url=f"{url}/completions", model="policy", **options)
    return [ask(ours), ask(HFLM(pretrained=model, dtype="float32", device="cpu", batch_size=1, max_length=256))]


def inspect(url: str, path: str) -> float:
    """The share of right greedy answers to the questions of a file."""
    from inspect_ai import Task, eval
    from inspect_ai.dataset import Sample, json_dataset
    from inspect_ai.model import GenerateConfig, get_model
    from inspect_ai.scorer import match

    dataset = json_dataset(path, lambda row: Sample(input=row["question"], target=row["answer"]))
    model = get_model("openai-api/rayrft/policy", base_url=url, api_key="-", config=GenerateConfig(temperature=0))
    [log] = eval(
        Task(dataset=dataset, scorer=match(location="exact")), model=model, display="none", log_dir=f"{path}.d"
    )
    assert log.status == "success", log.error
    assert log.results is not None
    return float(log.results.scores[0].metrics["accuracy"].value)


if __name__ == "__main__":
    harness, *arguments = sys.argv[1:]
    print(json.dumps({"lm_eval": lm_eval, "inspect": inspect}[harness](*arguments)))
