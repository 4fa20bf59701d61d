"""Run the benchmarks one after another, each as its own process. docs/lab.md keeps the results.

python bench/all.py [name ...]       (default: all but those that download)
"""

import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).parent
QUICK = [
    "footprint",
    "gateway_cost",
    "gateway_stages",
    "kill_worker",
    "speed_vs_genai",
    "perplexity",
    "soak",
    "agreement",
    "scheduling_cost",
    "measuring_cost",
]


def main() -> int:
    names = sys.argv[1:] or QUICK
    failed = []
    for name in names:
        print(f"\n== bench/{name}.py", flush=True)
        if subprocess.run([sys.executable, str(HERE / f"{name}.py")], check=False).returncode:
            failed.append(name)
    print(f"\nfailed: {', '.join(failed)}" if failed else "\nall done")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
