"""The embedded model over real HTTP, with the clients that people use."""

import json
import subprocess

import openai
import pytest

from harness import Server

pytestmark = pytest.mark.slow

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
def client(real_server: Server):
    with openai.OpenAI(base_url=f"{real_server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_the_openai_sdk_gets_paris_streamed_and_not(client):
    whole = client.chat.completions.create(model="smollm2", messages=QUESTION, temperature=0)
    assert "Paris" in whole.choices[0].message.content
    assert whole.choices[0].finish_reason == "stop"
    stream = client.chat.completions.create(
        model="smollm2", messages=QUESTION, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens


def test_curl_streams_the_same_text_as_it_gets_whole(real_server: Server):
    body = {"model": "smollm2", "messages": QUESTION, "temperature": 0}

    def curl(extra: dict, *flags: str) -> str:
        command = [
            "curl",
            "-sS",
            "-N",
            *flags,
            f"{real_server.url}/v1/chat/completions",
            "-H",
            "content-type: application/json",
        ]
        return subprocess.run([*command, "-d", json.dumps(body | extra)], capture_output=True, text=True, check=True).stdout

    whole = json.loads(curl({}))["choices"][0]["message"]["content"]
    assert "Paris" in whole
    events = [line[6:] for line in curl({"stream": True}).splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    deltas = [json.loads(event)["choices"][0]["delta"].get("content", "") for event in events[:-1]]
    assert "".join(deltas) == whole
    over_http2 = json.loads(curl({}, "--http2-prior-knowledge"))["choices"][0]["message"]["content"]
    assert over_http2 == whole


def test_completions_take_text_lists_and_token_ids(client, real_server: Server):
    text = "The first three planets are Mercury, Venus and"
    ids = json.loads(_post(real_server, "/tokenize", {"model": "smollm2", "prompt": text}))["tokens"]
    from_text = client.completions.create(model="smollm2", prompt=text, max_tokens=6, temperature=0)
    from_ids = client.completions.create(model="smollm2", prompt=ids, max_tokens=6, temperature=0)
    assert from_text.choices[0].text == from_ids.choices[0].text
    assert "Earth" in from_text.choices[0].text
    both = client.completions.create(model="smollm2", prompt=[text, "Water boils at"], max_tokens=6, temperature=0, n=1)
    assert [choice.index for choice in both.choices] == [0, 1]
    assert both.choices[0].text == from_text.choices[0].text
    assert json.loads(_post(real_server, "/detokenize", {"model": "smollm2", "tokens": ids}))["prompt"] == text


def test_ten_05_08_answers_never_mix(real_server: Server, client):
    """TEN-05, TEN-08: alternating chats with canary words; each reply holds its own."""
    import concurrent.futures

    def ask(word: str) -> str:
        messages = [{"role": "user", "content": f"Repeat exactly this one word and nothing else: {word}"}]
        reply = client.chat.completions.create(model="smollm2", messages=messages, temperature=0, max_tokens=12)
        return reply.choices[0].message.content

    words = ["harbour", "violin", "granite", "saffron", "lantern", "meadow", "copper", "orchid"]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(ask, words))
    for word, reply in zip(words, replies, strict=True):
        others = [other for other in words if other != word]
        assert not any(other in reply.lower() for other in others), (word, reply)


def test_seeded_sampling_repeats_and_differs_by_seed(client):
    def draw(seed: int) -> str:
        reply = client.completions.create(model="smollm2", prompt="Once upon a time", max_tokens=16, temperature=1.0, seed=seed)
        return reply.choices[0].text

    assert draw(42) == draw(42)
    assert len({draw(seed) for seed in range(4)}) > 1


def test_dis_05_closing_one_stream_leaves_the_others_as_they_were(real_server: Server):
    """DIS-05: 8 streams of greedy text, one is left midway; the other seven are what they are alone."""
    import asyncio

    from harness import post

    def body(number: int) -> dict:
        prompt = f"Chapter {number}. The old miller walked to the river and"
        return {"model": "smollm2", "prompt": prompt, "max_tokens": 20, "temperature": 0, "ignore_eos": True, "stream": True}

    async def together(leaver: int | None):
        tasks = [post(real_server, "/v1/completions", body(n), leave_after=3 if n == leaver else None) for n in range(8)]
        return await asyncio.gather(*tasks)

    before = [reply.text for reply in asyncio.run(together(None))]
    for leaver in (0, 4):
        after = [reply.text for reply in asyncio.run(together(leaver))]
        assert [text for n, text in enumerate(after) if n != leaver] == [text for n, text in enumerate(before) if n != leaver]


def _post(server: Server, path: str, body: dict) -> str:
    import urllib.request

    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as reply:
        return reply.read().decode()
