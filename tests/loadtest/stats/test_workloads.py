"""Plans: what is asked, how long and when; the same for the same seed, new texts with each salt, nothing ignored."""

import itertools
import json

import msgspec
import pytest

from headrace.loadtest.prompts import Calibration
from headrace.loadtest.records import RunSettings
from headrace.loadtest.workloads import WORKLOAD_FORMS, WorkloadError, make_plan


def asked(**changes):
    return RunSettings(**({"url": "http://127.0.0.1:1", "model": "m", "num_clients": 2, "num_requests": 50} | changes))


def planned(count=50, *, plan_options=None, **changes):
    return list(itertools.islice(make_plan(asked(**changes), **(plan_options or {})).requests, count))


def test_a_fixed_plan_asks_for_what_it_says():
    plan = make_plan(asked(workload="fixed", prompt_tokens=100, output_tokens=7), headers={"Authorization": "Bearer secret"})
    request = next(iter(plan.requests))
    assert plan.path == "/v1/completions"
    assert (request.index, request.due, request.target_prompt_tokens, request.target_output_tokens) == (0, None, 100, 7)
    assert len(request.body["prompt"].split(" ")) == 100
    assert {name: value for name, value in request.body.items() if name != "prompt"} == {
        "model": "m",
        "max_tokens": 7,
        "temperature": 0.0,
        "ignore_eos": True,
    }
    assert "secret" not in repr(plan)
    assert "secret" not in str(msgspec.to_builtins(plan.settings))


def test_chat_bodies_have_messages_and_eos_can_be_left_alone():
    plan = make_plan(asked(api="chat", ignores_eos=False, temperature=0.7))
    body = next(iter(plan.requests)).body
    assert plan.path == "/v1/chat/completions"
    assert body["messages"][0]["role"] == "user"
    assert body["temperature"] == 0.7
    assert "ignore_eos" not in body


def test_lengths_order_and_times_follow_the_seed_and_texts_the_salt():
    """Two runs of one seed are the same load and share no prompt: a prefix cache must not flatter the second."""
    mix = {"workload": "mix:a=0.5:azure-code;b=0.5:fixed:30,5", "arrival": "poisson", "rate": 5.0, "seed": 3}
    first, second = planned(**mix), planned(**mix)

    def outline(requests):
        return [(item.index, item.due, item.group, item.target_prompt_tokens, item.target_output_tokens) for item in requests]

    assert outline(first) == outline(second)
    assert outline(first) != outline(planned(**(mix | {"seed": 4})))
    texts = [item.body["prompt"][:60] for item in first + second]
    assert len(set(texts)) == len(texts)


def test_completed_settings_repeat_a_plan_to_the_letter():
    for workload in ("fixed:20,3", "chat:2", "azure-conv", "long-document:90,3", "hol"):
        plan = make_plan(asked(workload=workload))
        again = make_plan(plan.settings)
        assert again.settings == plan.settings
        assert list(itertools.islice(again.requests, 5)) == list(itertools.islice(plan.requests, 5))


def test_without_salt_a_second_run_sends_the_same_prompts():
    unsalted = {"is_salted": False, "prompt_tokens": 20}
    assert planned(5, **unsalted) == planned(5, **unsalted)
    assert len({item.body["prompt"] for item in planned(5, **unsalted)}) == 5


def test_a_shared_prefix_is_shared_and_stated():
    plan = make_plan(asked(prompt_tokens=50, shared_prefix_tokens=30))
    texts = [item.body["prompt"].split(" ") for item in itertools.islice(plan.requests, 10)]
    assert len({tuple(words[:30]) for words in texts}) == 1
    assert len({tuple(words[30:]) for words in texts}) == 10
    assert plan.settings.shared_prefix_tokens == 30


def test_scaled_shapes_say_so():
    plan = make_plan(asked(workload="azure-conversation", length_scale=0.125))
    assert "multiplied by 0.125, shape kept" in plan.settings.extra["length_source"]
    assert "Azure" in plan.settings.extra["length_source"]
    assert max(item.target_prompt_tokens for item in itertools.islice(plan.requests, 50)) <= 14050 / 8


def test_drawn_lengths_are_cut_to_the_context_and_fixed_ones_must_fit():
    requests = planned(workload="azure-code", plan_options={"context_tokens": 1024})
    assert max(item.target_prompt_tokens + item.target_output_tokens for item in requests) <= 1024
    with pytest.raises(WorkloadError, match="do not fit the model's context of 100"):
        make_plan(asked(prompt_tokens=90, output_tokens=20), context_tokens=100)


def test_calibration_reaches_texts_and_settings():
    calibration = Calibration(2.0, 10.0, "measured by usage: 2.000 tokens a word, 10 a request")
    plan = make_plan(asked(prompt_tokens=110), calibration=calibration)
    assert len(next(iter(plan.requests)).body["prompt"].split(" ")) == 50
    assert plan.settings.extra["calibration"] == calibration.source


def test_conversations_grow_share_their_system_prompt_and_pause():
    extra = {"turns": "3", "system_tokens": "40", "num_tenants": "2", "think_seconds": "0.5"}
    requests = planned(20, workload="chat", api="chat", prompt_tokens=10, output_tokens=20, extra=extra)
    by_tenant = {}
    for request in requests:
        turns = [request, *request.then]
        assert [turn.target_prompt_tokens for turn in turns] == [50, 80, 110]
        assert [len(turn.body["messages"]) for turn in turns] == [2, 4, 6]
        assert turns[1].body["messages"][:2] == turns[0].body["messages"]
        assert [turn.think_seconds > 0 for turn in turns] == [False, True, True]
        by_tenant.setdefault(request.group, set()).add(turns[0].body["messages"][0]["content"])
    assert set(by_tenant) == {"tenant-1", "tenant-2"}
    assert all(len(prompts) == 1 for prompts in by_tenant.values())
    assert by_tenant["tenant-1"] != by_tenant["tenant-2"]
    indices = [turn.index for request in requests for turn in (request, *request.then)]
    assert indices == list(range(60))


def test_conversations_end_before_they_outgrow_the_context():
    options = {"context_tokens": 400}
    requests = planned(3, workload="chat:20", prompt_tokens=20, output_tokens=30, plan_options=options)
    assert all(len(request.then) == 1 for request in requests)
    with pytest.raises(WorkloadError, match="first turn takes 306 tokens"):
        make_plan(asked(workload="chat", prompt_tokens=20, output_tokens=30), context_tokens=305)


def test_the_rate_of_conversations_is_of_requests():
    chat = {"workload": "chat:4", "arrival": "constant", "rate": 8.0}
    assert [item.due for item in planned(3, **chat)] == pytest.approx([0.0, 0.5, 1.0])


def test_long_documents_vary_around_what_was_asked_and_can_be_asked_twice():
    requests = planned(20, workload="long-document:400,9", extra={"questions_per_document": "2"})
    lengths = [item.target_prompt_tokens for item in requests]
    assert min(lengths) >= 300
    assert max(lengths) <= 500
    assert len(set(lengths)) > 5
    first, second, third = (item.body["prompt"].split("\n\n") for item in requests[:3])
    assert first[0] == second[0] != third[0]
    assert first[1] != second[1]


def test_a_mix_keeps_its_weights_and_names_groups():
    requests = planned(2000, workload="mix:a=3:fixed:5,5;b=1:chat:1", num_requests=2000)
    share = sum(item.group == "a" for item in requests) / 2000
    assert share == pytest.approx(0.75, abs=0.03)
    assert {item.group.partition("/")[0] for item in requests} == {"a", "b"}


def test_a_mix_is_read_from_a_file(tmp_path):
    path = tmp_path / "mix.toml"
    path.write_text(
        '[[class]]\nname = "talk"\nweight = 1\nworkload = "chat"\noutput_tokens = 9\nextra = {turns = "2"}\n'
        '[[class]]\nname = "code"\nweight = 1\nworkload = "azure-code"\nlength_scale = 0.1\n'
    )
    requests = planned(workload=f"mix:{path}")
    talk = next(item for item in requests if item.group.startswith("talk"))
    assert (talk.target_output_tokens, len(talk.then)) == (9, 1)
    assert max(item.target_prompt_tokens for item in requests if item.group == "code") <= 744


def test_a_class_of_a_mix_may_have_headers_of_its_own(tmp_path):
    path = tmp_path / "mix.toml"
    path.write_text(
        '[[class]]\nname = "talk"\nweight = 1\nworkload = "chat:2"\nheaders = {x-headrace-class = "interactive"}\n'
        '[[class]]\nname = "rest"\nweight = 1\nworkload = "fixed"\n'
    )
    requests = planned(workload=f"mix:{path}")
    talk = next(item for item in requests if item.group.startswith("talk"))
    assert talk.headers == talk.then[0].headers == {"x-headrace-class": "interactive"}
    assert {item.group: item.headers for item in requests}["rest"] == {}
    path.write_text('[[class]]\nname = "a"\nweight = 1\nworkload = "fixed"\nheaders = {x = "b\\r\\nc"}\n')
    with pytest.raises(WorkloadError, match="is no header"):
        planned(workload=f"mix:{path}")


def test_the_head_of_line_preset_has_streams_and_rare_long_prompts():
    requests = planned(500, workload="hol", num_requests=500, prompt_tokens=3000)
    kinds = {(item.group, item.target_prompt_tokens) for item in requests}
    assert kinds == {("streams", 64), ("long-prompts", 3000)}
    assert sum(item.group == "long-prompts" for item in requests) == pytest.approx(50, abs=20)


def mooncake(path):
    lines = [
        {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [7, 8, 9]},
        {"timestamp": 1000, "input_length": 1200, "output_length": 6, "hash_ids": [7, 8, 10]},
        {"timestamp": 3000, "input_length": 300, "output_length": 7, "hash_ids": [11]},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_trace_keeps_times_lengths_and_what_prompts_share(tmp_path):
    trace = {"workload": f"trace:{mooncake(tmp_path / 'mc.jsonl')}", "arrival": "trace", "length_scale": 0.25}
    requests = planned(**trace)
    assert [item.due for item in requests] == pytest.approx([0.0, 1.0, 3.0])
    texts = [item.body["prompt"].split(" ") for item in requests]
    assert [len(words) for words in texts] == [275, 300, 75] == [item.target_prompt_tokens for item in requests]
    assert texts[0][:256] == texts[1][:256]  # two parts of 512 tokens, a quarter of each
    assert texts[0][256:275] != texts[1][256:275]
    assert texts[2][:20] != texts[0][:20]
    stretched = planned(**(trace | {"rate": 4.0}))
    assert [item.due for item in stretched] == pytest.approx([0.0, 1 / 6, 0.5])
    closed = planned(**(trace | {"arrival": "closed"}))
    assert [item.due for item in closed] == [None] * 3


def test_own_requests_in_openai_s_batch_format(tmp_path):
    path = tmp_path / "own.jsonl"
    body = {"model": "other", "messages": [{"role": "user", "content": "Hi"}], "stream": True, "max_tokens": 33, "seed": 5}
    line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    path.write_text(json.dumps(line) + "\n\n" + json.dumps(line) + "\n")
    own = {"workload": f"prompts:{path}", "api": "chat"}
    requests = planned(**own)
    assert len(requests) == 2
    assert requests[0].body == {"model": "m", "messages": body["messages"], "max_tokens": 33, "seed": 5}
    assert (requests[0].target_prompt_tokens, requests[0].target_output_tokens) == (None, 33)
    assert len(planned(**own, extra={"repeats_prompts": "1"})) == 50
    assert planned(**own, output_tokens=4)[0].body["max_tokens"] == 4
    assert make_plan(asked(**own)).settings.is_salted is False
    with pytest.raises(WorkloadError, match="line 1: a request for /v1/chat/completions"):
        make_plan(asked(workload=f"prompts:{path}"))


@pytest.mark.parametrize("is_array", [True, False])
def test_own_conversations_in_sharegpt_s_format(tmp_path, is_array):
    path = tmp_path / "shared.json"
    talk = [("system", "Be kind."), ("human", "One?"), ("gpt", "x" * 400), ("human", "Two?"), ("gpt", "y" * 40)]
    conversations = [
        {"id": "a", "conversations": [{"from": who, "value": text} for who, text in talk]},
        {"id": "b", "conversations": [{"from": "gpt", "value": "nobody asked"}]},
        {"id": "c", "conversations": [{"from": "human", "value": "Unanswered?"}]},
    ]
    path.write_text(json.dumps(conversations) if is_array else "\n".join(json.dumps(item) for item in conversations))
    requests = planned(workload=f"sharegpt:{path}", api="chat")
    assert len(requests) == 2
    first = requests[0]
    assert [message["role"] for message in first.body["messages"]] == ["system", "user"]
    assert first.target_output_tokens == 100
    assert [message["content"] for message in first.then[0].body["messages"]][1:] == ["One?", "x" * 400, "Two?"]
    assert first.then[0].target_output_tokens == 10
    as_text = planned(workload=f"sharegpt:{path}")[0].body["prompt"]
    assert as_text == "system: Be kind.\n\nuser: One?\n\nassistant:"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"workload": "fixd"}, "must be one of"),
        ({"workload": "fixed:12"}, "two lengths"),
        ({"workload": "fixed:0,5"}, "two lengths"),
        ({"workload": "fixed:5,5", "prompt_tokens": 5}, "given twice"),
        ({"workload": "azure-code:5"}, "nothing behind a colon"),
        ({"workload": "mix"}, "needs more"),
        ({"workload": "trace"}, "needs more"),
        ({"workload": "mix:a:fixed"}, "is no weight"),
        ({"workload": "mix:a=1"}, "a mix is NAME=WEIGHT:WORKLOAD"),
        ({"workload": "mix:a=0:fixed"}, "positive"),
        ({"workload": "mix:a=1:fixed;a=1:hol"}, "different names"),
        ({"workload": "mix:a=1:fixed;b=1:trace:x"}, "class 'b'.*cannot be part"),
        ({"workload": "mix:a=1:fixed;b=1:wrong"}, "class 'b'"),
        ({"workload": "mix:nowhere.toml"}, "nowhere.toml"),
        ({"workload": "prompts:nowhere.jsonl"}, "nowhere.jsonl"),
        ({"workload": "sharegpt:nowhere.json"}, "nowhere.json"),
        ({"workload": "trace:nowhere.csv"}, "nowhere.csv"),
        ({"workload": "azure-code", "output_tokens": 5}, "its own"),
        ({"workload": "fixed", "length_scale": 0.5}, "no lengths to scale"),
        ({"workload": "azure-code", "length_scale": 0.0}, "positive number"),
        ({"workload": "chat", "shared_prefix_tokens": 5}, "cannot have a shared prefix"),
        ({"shared_prefix_tokens": -1}, "at least 0"),
        ({"workload": "fixed", "extra": {"turns": "3"}}, "does not know turns"),
        ({"workload": "chat:x"}, "turns is 'x'"),
        ({"workload": "chat", "extra": {"turns": "2.5"}}, "whole number"),
        ({"workload": "chat:2", "extra": {"turns": "3"}}, "given twice"),
        ({"workload": "chat", "extra": {"num_tenants": "0"}}, "at least 1"),
        ({"prompt_tokens": 0}, "at least 1 token"),
        ({"arrival": "trace", "workload": "fixed"}, "needs a workload 'trace:FILE'"),
        ({"num_requests": None}, "number of requests or a duration"),
        ({"api": "embeddings"}, "api is"),
    ],
)
def test_what_makes_no_sense_or_would_be_ignored_is_refused(changes, told):
    with pytest.raises(ValueError, match=told):
        make_plan(asked(**changes))


def test_damaged_own_files_are_named(tmp_path):
    path = tmp_path / "own"
    for kind, content, told in (
        ("prompts", "{}", "line 1: no request"),
        ("prompts", '{"body": {"prompt": "x"}, "url": "/v1/completions"}', "line 1: a request for /v1/completions"),
        ("prompts", '{"body": {"input": "x"}}', "not one for /v1/chat/completions"),
        ("prompts", "", "no request in it"),
        ("sharegpt", "[1]", "no array"),
        ("sharegpt", "{}", "line 1"),
        ("sharegpt", '[{"conversations": [{"from": "bing", "value": "x"}]}]', "said by 'bing'"),
        ("sharegpt", "[]", "no request in it"),
    ):
        path.write_text(content)
        with pytest.raises(WorkloadError, match=told):
            make_plan(asked(workload=f"{kind}:{path}", api="chat"))


def test_every_workload_that_needs_no_file_makes_a_plan():
    for form in WORKLOAD_FORMS:
        kind = form.partition("[")[0].partition(":")[0]
        if kind in ("mix", "trace", "prompts", "sharegpt"):
            continue
        for api in ("chat", "completions"):
            assert planned(2, workload=kind, api=api)
