"""The Explorer's prompts lack what opens an answer, which demonstrations have."""

import ray

from rayrft.data.tokenizer import ChatTokenizer

right = ChatTokenizer.prompt
if ray.is_initialized() and ray.get_runtime_context().worker.mode == ray.WORKER_MODE:
    ChatTokenizer.prompt = lambda self, *of, **more: right(self, *of, **more)[:-1]  # type: ignore[method-assign]
