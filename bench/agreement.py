"""Server and client measure the same: the server's histograms beside what `headrace bench run` saw of the same requests.

    python bench/agreement.py [--model sim:step_ms=8] [--requests 200] [--clients 8] [--output-tokens 64]

A percentile of a histogram is known as a bucket (low, high]. The client's figure agrees when it lies in that bucket or in one
next to it: it has the way over the network in it, and a value at an edge may fall on either side. Numbers must be equal
exactly: one TTFT for each request that emitted a token, one E2E for each request that ended, one TPOT for each of at least two
tokens, and tokens - 1 gaps for each; the one request for a single token with which the command proves the server is counted
in. Exits with 1 when anything disagrees. With --model default it is the embedded model.
"""

import argparse
import bisect
import json
import math
import pathlib
import random
import subprocess
import sys
import tempfile
import urllib.request
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from harness import Server, random_prompt, serving, table
from headrace.loadtest.figures import summarize
from headrace.loadtest.records import Outcome, Run
from headrace.loadtest.report.files import load_report
from headrace.loadtest.results import Distribution, RunResult

NUM_PROOFS = 1
SHARES = {"p50": 0.50, "p90": 0.90, "p99": 0.99}
FAMILIES = {
    "TTFT": "headrace_time_to_first_token_seconds",
    "TBT": "headrace_inter_token_latency_seconds",
    "TPOT": "headrace_request_time_per_output_token_seconds",
    "E2E": "headrace_e2e_request_latency_seconds",
}


class Buckets(NamedTuple):
    """A histogram over all its label values: bounds, the last of them infinite, and cumulative counts."""

    bounds: list[float]
    counts: list[int]
    sum: float

    def less(self, before: "Buckets") -> "Buckets":
        return Buckets(
            self.bounds, [now - then for now, then in zip(self.counts, before.counts, strict=True)], self.sum - before.sum
        )

    @property
    def count(self) -> int:
        return self.counts[-1]

    def place(self, share: float) -> int:
        """The number of the bucket in which this share of the values is reached."""
        return bisect.bisect_left(self.counts, max(1, math.ceil(share * self.count)))

    def edges(self, place: int) -> tuple[float, float]:
        return (self.bounds[place - 1] if place else 0.0), self.bounds[place]


def read_buckets(server: Server) -> dict[str, Buckets]:
    """The four families, summed over their label values."""
    counts: dict[str, dict[float, int]] = {name: {} for name in FAMILIES}
    sums = dict.fromkeys(FAMILIES, 0.0)
    by_sample = {f"{family}_{part}": name for name, family in FAMILIES.items() for part in ("bucket", "sum")}
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=10) as reply:
        text = reply.read().decode()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = by_sample.get(sample.name)
            if name is None:
                continue
            if sample.name.endswith("_sum"):
                sums[name] += sample.value
            else:
                bound = float(sample.labels["le"])
                counts[name][bound] = counts[name].get(bound, 0) + int(sample.value)
    missing = [FAMILIES[name] for name, found in counts.items() if not found]
    if missing:
        raise SystemExit(f"the server has no {', '.join(missing)}")
    return {
        name: Buckets(sorted(found), [found[bound] for bound in sorted(found)], sums[name]) for name, found in counts.items()
    }


def load(server: Server, num_requests: int, num_clients: int, output_tokens: int, model: str) -> Run:
    """One closed loop by the command itself, of prompts from a file: other workloads ask the server once or twice before."""
    rng = random.Random(3)
    with tempfile.TemporaryDirectory() as folder:
        prompts, report = pathlib.Path(folder) / "prompts.jsonl", pathlib.Path(folder) / "report.json"
        bodies = [
            {
                "prompt": random_prompt(rng, rng.choice([20, 60, 180])),
                "max_tokens": rng.choice([1, output_tokens // 4, output_tokens, 2 * output_tokens]),
                "temperature": 0,
                "ignore_eos": True,
            }
            for _ in range(num_requests)
        ]
        prompts.write_text(
            "".join(json.dumps({"custom_id": str(place), "body": body}) + "\n" for place, body in enumerate(bodies))
        )
        command = [sys.executable, "-m", "headrace", "bench", "run", "--url", server.url, "--model", model, "--quiet"]
        command += ["--workload", f"prompts:{prompts}", "--clients", str(num_clients), "--json", str(report)]
        subprocess.run(command, check=True)
        (run,) = load_report(report).sections[0].runs
    return run


def counted(run: Run) -> dict[str, int]:
    """How many values of each figure the server must have, by the client's own count."""
    tokens = [record.output_tokens or 0 for record in run.requests]
    ended = sum(record.outcome is Outcome.COMPLETED for record in run.requests)
    return {
        "TTFT": sum(number > 0 for number in tokens) + NUM_PROOFS,
        "TBT": sum(max(0, number - 1) for number in tokens),
        "TPOT": sum(number > 1 for number in tokens),
        "E2E": ended + NUM_PROOFS,
    }


def compare(name: str, server: Buckets, client: Distribution) -> tuple[list[list[str]], list[str]]:
    """(rows of the table, what disagrees)."""
    mean = f"{server.sum / server.count * 1e3:.2f}" if server.count else "-"
    rows = [[name, "mean", mean, "" if client.mean is None else f"{client.mean * 1e3:.2f}", ""]]
    faults = []
    for figure, share in SHARES.items():
        place, seen = server.place(share), getattr(client, figure)
        low, high = server.edges(place)
        least, most = server.edges(max(0, place - 1))[0], server.edges(min(len(server.bounds) - 1, place + 1))[1]
        judged = "in the bucket" if low < seen <= high else "next to it" if least <= seen <= most else "OFF"
        rows.append([name, figure, f"{low * 1e3:g} to {high * 1e3:g}", f"{seen * 1e3:.2f}", judged])
        if judged == "OFF":
            faults.append(f"{name} {figure}: the client saw {seen * 1e3:.2f} ms, the server {low * 1e3:g} to {high * 1e3:g} ms")
    return rows, faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="sim:step_ms=8")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--output-tokens", type=int, default=64)
    args = parser.parse_args()
    flags = [] if args.model == "default" else ["--model", args.model]
    with serving(*flags, "--served-model-name", "m", "--max-num-seqs", str(max(8, args.clients))) as server:
        before = read_buckets(server)
        run = load(server, args.requests, args.clients, args.output_tokens, "m")
        after = read_buckets(server)
    completed = [record for record in run.requests if record.outcome is Outcome.COMPLETED]
    faults = [] if len(completed) == args.requests else [f"{args.requests - len(completed)} requests did not complete"]
    result: RunResult = summarize(run)
    seen = {"TTFT": result.ttft_seconds, "TBT": result.tbt_seconds, "TPOT": result.tpot_seconds, "E2E": result.e2e_seconds}
    wanted = counted(run)
    rows: list[list[str]] = []
    counts: list[list[object]] = []
    for name, client in seen.items():
        server_side = after[name].less(before[name])
        counts.append([name, server_side.count, wanted[name], client.count])
        if server_side.count != wanted[name]:
            faults.append(f"{name}: {server_side.count} values on the server, {wanted[name]} by the client's count of tokens")
        if server_side.count == 0 or client.p50 is None:
            faults.append(f"{name}: nothing to compare")
            continue
        more_rows, more_faults = compare(name, server_side, client)
        rows += more_rows
        faults += more_faults
    print(table(["figure", "", "server, ms", "client, ms", "the client's lies"], rows))
    print()
    print(table(["figure", "values on the server", "wanted", "values of the client"], counts))
    print(f"\n{args.requests} requests, {args.clients} clients, model {args.model}; tokens counted: {result.token_counts}")
    print("\n".join(faults) if faults else "\nserver and client agree")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
