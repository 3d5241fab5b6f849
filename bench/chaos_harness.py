"""The harness of the chaos run: an agent loop in plain Python that journals what it sent and what it saw.

Runs as harness `command`, by path. Standard library only. Arguments: the journal's directory, and how many turns. One
file per process, one JSON object a line, flushed line by line: a kill loses nothing that was seen.
"""

import base64
import json
import os
import random
import sys
import time
import urllib.error
import urllib.request

TOOLS = [
    {"type": "function", "function": {"name": "bash", "description": "run", "parameters": {
        "type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}}}
]  # fmt: skip
PATIENCE_S = 90.0


def main() -> None:
    directory, turns = sys.argv[1], int(sys.argv[2])
    base = os.environ["OPENAI_BASE_URL"]
    payload = os.environ["OPENAI_API_KEY"].split(".")[1]
    key = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    session, attempt = key["s"], key["a"]
    path = os.path.join(directory, f"{session}.{attempt}.{os.getpid()}.jsonl")
    with open(path, "a", encoding="utf-8") as file:

        def write(**facts: object) -> None:
            file.write(json.dumps({"session": session, "attempt": attempt, "at": time.time(), **facts}) + "\n")
            file.flush()

        write(event="start", pid=os.getpid())
        rng = random.Random(f"{session}/{attempt}")
        messages: list[dict[str, object]] = [{"role": "user", "content": os.environ["POLAR_INSTRUCTION"]}]
        for turn in range(turns):
            stream = rng.random() < 0.5
            answer = ask(base, messages, stream, turn, write)
            if answer is None:
                write(event="stop", turn=turn)
                sys.exit(3)
            messages.append(answer)
            calls = answer.get("tool_calls") or []
            for call in calls if isinstance(calls, list) else []:
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": f"done {turn}"})
            if not calls:
                messages.append({"role": "user", "content": f"go on, part {turn}"})
        write(event="end")
    print("hello")


def ask(base, messages, stream, turn, write):  # type: ignore[no-untyped-def]
    """One call, tried again as an SDK does; None when it can't be had."""
    deadline, tries = time.time() + PATIENCE_S, 0
    while True:
        body = {"model": "policy", "messages": messages, "tools": TOOLS, "max_tokens": 64, "stream": stream}
        headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
        if tries:
            headers["x-stainless-retry-count"] = str(tries)
        write(event="sent", turn=turn, retry=tries, stream=stream)
        try:
            request = urllib.request.Request(base + "/chat/completions", json.dumps(body).encode(), headers)
            with urllib.request.urlopen(request, timeout=60) as response:
                found = streamed(response) if stream else whole(response)
            if found is not None:
                message, name, finish, tokens = found
                write(event="saw", turn=turn, id=name, finish=finish, tokens=tokens, tries=tries)
                return message
            write(event="cut", turn=turn)
        except urllib.error.HTTPError as error:
            write(event="refused", turn=turn, status=error.code, body=error.read().decode(errors="replace")[:300])
            if error.code in (400, 401, 403, 404, 409):
                return None
        except (OSError, ValueError) as error:
            write(event="broken", turn=turn, error=repr(error))
        tries += 1
        if time.time() > deadline:
            return None
        time.sleep(min(2.0, 0.2 * tries))


def whole(response):  # type: ignore[no-untyped-def]
    told = json.load(response)
    choice = told["choices"][0]
    return choice["message"], told["id"], choice["finish_reason"], told["usage"]["completion_tokens"]


def streamed(response):  # type: ignore[no-untyped-def]
    """The message of a stream, or None if it ended before its terminal event."""
    text, calls, name, finish = "", {}, "", None
    for raw in response:
        line = raw.decode().strip()
        if not line.startswith("data:"):
            continue
        data = line[5:].strip()
        if data == "[DONE]":
            break
        chunk = json.loads(data)
        if "error" in chunk:
            return None
        name = chunk.get("id") or name
        for choice in chunk.get("choices", ()):
            delta = choice.get("delta", {})
            text += delta.get("content") or ""
            for part in delta.get("tool_calls") or ():
                call = calls.setdefault(
                    part["index"], {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
                )
                call["id"] = part.get("id") or call["id"]
                call["function"]["name"] += part.get("function", {}).get("name") or ""
                call["function"]["arguments"] += part.get("function", {}).get("arguments") or ""
            finish = choice.get("finish_reason") or finish
    if finish is None:
        return None
    message = {"role": "assistant", "content": text or None}
    if calls:
        message["tool_calls"] = [calls[i] for i in sorted(calls)]
    return message, name, finish, None


if __name__ == "__main__":
    main()
