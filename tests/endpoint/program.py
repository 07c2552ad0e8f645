"""A command-line agent that knows nothing of rayrft: it calls its model as its environment says, and writes files.

Its argument begins with a word that says what it does; the rest is what the model is to be asked.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

KEY = os.environ["OPENAI_API_KEY"]


def post(url: str, headers: dict[str, str], body: dict[str, Any]) -> Any:
    headers = {"Content-Type": "application/json", **headers}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request))


def ask(messages: list[dict[str, str]]) -> str:
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    answer = post(url, {"Authorization": f"Bearer {KEY}"}, {"model": "gpt-5", "messages": messages})
    messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
    return messages[-1]["content"]


def ask_anthropic(question: str) -> str:
    messages = [{"role": "user", "content": question}]
    body = {"model": "claude", "max_tokens": 30, "messages": messages}
    return post(os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages", {"x-api-key": KEY}, body)["content"][0]["text"]


def can_reach(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), 2).close()
    except OSError:
        return False
    return True


def main(what: str, question: str) -> None:
    messages = [{"role": "user", "content": question}]
    first = ask(messages)
    match what:
        case "talks":
            messages.append({"role": "user", "content": "Sure?"})
            print(f"Final: {ask(messages)}")
        case "delegates":
            print(ask_anthropic(f"Check {first}"))
        case "writes":
            Path("sub").mkdir()
            Path("sub", "answer.txt").write_text(f"{first} {Path('given', 'hint.txt').read_text()}")
        case "solves":
            Path("solution.py").write_text("def double(x):\n    return 2 * x\n")
            print(sorted(str(path) for path in Path().rglob("*") if path.is_file()))
        case "looks":
            secret = [name for name in os.environ if "SECRET" in name]
            files = [path for path in ("/etc/shadow", os.environ["OUTSIDE"]) if Path(path).exists()]
            processes = [path for path in Path("/proc").glob("[0-9]*/cmdline") if b"pytest" in path.read_bytes()]
            host, port = os.environ["SERVER"].split(":")
            Path("/tmp/here").write_text("x")
            print(json.dumps([secret, files, len(processes), can_reach(host, int(port)), can_reach("8.8.8.8", 53)]))
        case "fails":
            sys.exit("no such customer")
        case "hangs":
            subprocess.Popen(["/bin/sleep", "1000"])
            time.sleep(1000)
        case "grows":
            held = [b"x" * (8 << 20) for _ in range(100)]
            print(len(held))
        case "reads":
            print(sys.stdin.read().upper())


if __name__ == "__main__":
    main(*sys.argv[1].split(" ", 1))
