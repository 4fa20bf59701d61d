"""A continuous-batching server in virtual time: Runs whose truth is known, blocked or not, over-saturated or not."""

import random

from headrace.loadtest.records import ClientLoad, Outcome, RequestRecord, Run, RunSettings

STEP_SECONDS = 0.004
SECONDS_PER_ROW = 0.0005
SECONDS_PER_PROMPT_TOKEN = 0.0002


def quiet_client(**changes) -> ClientLoad:
    values = {
        "num_processes": 2,
        "cpu_cores_used": 0.1,
        "max_process_cpu_share": 0.05,
        "send_lag_p50_seconds": 0.0,
        "send_lag_p99_seconds": 0.0,
        "loop_lag_p99_seconds": 0.001,
    }
    return ClientLoad(**(values | changes))


def make_run(requests, *, arrival="poisson", window=None, seed=0, **settings) -> Run:
    end = max([record.ended or 0.0 for record in requests], default=1.0)
    begin, finish = window or (0.0, end)
    return Run(
        settings=RunSettings(url="http://127.0.0.1:1", model="m", arrival=arrival, seed=seed, **settings),
        wall_seconds=max(end, finish),
        window_begin=begin,
        window_end=finish,
        client=quiet_client(),
        requests=list(requests),
    )


def simulate(arrivals, *, token_budget, max_rows=64, seed=0, shares_budget=False, **settings) -> Run:
    """`arrivals`: (due, prompt tokens, output tokens). A step serves every running row, then prompts in order of arrival.

    `shares_budget`: what a step has for prompts is dealt over all waiting ones, so that short ones are not held up.
    """
    noise = random.Random(seed)
    queue = sorted((due, place, prompt, output) for place, (due, prompt, output) in enumerate(arrivals))
    records = {
        place: RequestRecord(
            index=place,
            process=0,
            scheduled=due,
            sent=due,
            prompt_tokens=prompt,
            output_tokens=output,
            finish_reasons=["length"],
        )
        for due, place, prompt, output in queue
    }
    left_prompt = {place: prompt for _, place, prompt, _ in queue}
    left_output = {place: output for _, place, _, output in queue}
    admitted: list[int] = []
    now, arrived = 0.0, 0
    while arrived < len(queue) or admitted:
        while arrived < len(queue) and queue[arrived][0] <= now and len(admitted) < max_rows:
            admitted.append(queue[arrived][1])
            arrived += 1
        if not admitted:
            now = queue[arrived][0]
            continue
        decoding = [place for place in admitted if left_prompt[place] == 0]
        waiting = [place for place in admitted if left_prompt[place] > 0]
        budget = token_budget - len(decoding)
        done_prompts, used = [], 0
        for number, place in enumerate(waiting):
            share = budget - used if not shares_budget else (budget - used) // (len(waiting) - number)
            taken = min(left_prompt[place], max(share, 0))
            left_prompt[place] -= taken
            used += taken
            if left_prompt[place] == 0:
                done_prompts.append(place)
        cost = STEP_SECONDS + SECONDS_PER_ROW * len(decoding) + SECONDS_PER_PROMPT_TOKEN * used
        now += cost * noise.uniform(0.95, 1.05)
        for place in decoding + done_prompts:
            record = records[place]
            record.chunk_times = [*record.chunk_times, now] if not record.chunk_times else record.chunk_times
            if record.chunk_times[-1] != now:
                record.chunk_times.append(now)
            left_output[place] -= 1
            if left_output[place] == 0:
                record.ended, record.outcome = now, Outcome.COMPLETED
                record.chunk_chars = [4] * len(record.chunk_times)
                admitted.remove(place)
    return make_run(records.values(), seed=seed, **settings)


def poisson_arrivals(rate, seconds, lengths, seed=0):
    """`lengths(random) -> (prompt tokens, output tokens)`."""
    source = random.Random(seed)
    now, found = 0.0, []
    while (now := now + source.expovariate(rate)) < seconds:
        found.append((now, *lengths(source)))
    return found


def mixed_lengths(source):
    """Mostly short prompts with answers that stream for a while; every tenth a long prompt."""
    return (2000, 20) if source.random() < 0.1 else (50, 80)
