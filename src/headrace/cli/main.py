"""The `headrace` command and its subcommands.

Owns: names, help and exit codes of the commands. Runs in: CLI. Must not know: how anything is done (launch/ does it).
"""

import asyncio
import importlib
import sys
from typing import Any

import click

from headrace import __version__
from headrace.cli.numbers import NumberRange
from headrace.cli.options import whose_option, with_settings
from headrace.launch.settings import Settings
from headrace.protocol.errors import HeadraceError

EXAMPLES = """
\b
Examples:
  headrace serve                                   the embedded model at http://127.0.0.1:8000
  headrace serve --model ./qwen2.5-coder.gguf --port 9000
  headrace serve --model sim:step_ms=5             no weights, for load tests
  headrace run "What is the capital of France?"    one answer, no server
  headrace models                                  what is prepared, and its size
  headrace bench run --url http://127.0.0.1:8000   measure any OpenAI-compatible server
  headrace audit http://127.0.0.1:8000             check one against what applications will meet
  headrace top                                     what a running server does, live
  headrace simulate --load 1.5 --retry             policies compared under a virtual clock
  headrace doctor                                  is this machine fit, is anything left over
"""


LAZY_COMMANDS = {  # imported when they are asked for
    "audit": "headrace.cli.audit",
    "bench": "headrace.cli.bench",
    "simulate": "headrace.cli.simulate",
    "top": "headrace.cli.top",
}


class _Group(click.Group):
    """Turns Headrace's own errors into one readable line and exit code 1. Imports what `serve` does not need only on demand.

    To an option that a command does not have it says whose it is.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *LAZY_COMMANDS})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in LAZY_COMMANDS:
            command: click.Command = getattr(importlib.import_module(LAZY_COMMANDS[cmd_name]), cmd_name)
            return command
        return super().get_command(ctx, cmd_name)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except HeadraceError as error:
            raise click.ClickException(error.message) from None
        except click.NoSuchOption as error:
            owners = whose_option(error.option_name, self.commands.values())
            if not owners:
                raise
            message = f"No such option '{error.option_name}'. It is an option of {owners}."
            raise click.NoSuchOption(error.option_name, message, ctx=error.ctx) from None


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}, epilog=EXAMPLES)
@click.version_option(__version__, "-V", "--version")
def main() -> None:
    """Headrace serves language models: continuous batching, a paged KV cache, tokens streamed over the OpenAI API."""


@main.command(
    epilog="""
\b
Examples:
  headrace serve
  headrace serve --model ./model.gguf --max-num-seqs 32 --kv-cache-gib 4
  headrace serve --config headrace.toml --log-format json
  HEADRACE_PORT=9000 headrace serve
"""
)
@with_settings()
def serve(settings: Settings) -> None:
    """Run the server until SIGTERM or Ctrl-C; running streams may then finish within --drain-seconds."""
    from headrace.launch.serve import serve as run_server

    sys.exit(asyncio.run(run_server(settings)))


@main.command(
    epilog="""
\b
Examples:
  headrace run "What is the capital of France?"
  headrace run --temperature 0.8 --max-tokens 200 "Write a haiku about rivers"
  cat notes.txt | headrace run --system "Summarise in one sentence." -
"""
)
@click.argument("prompt")
@click.option("--system", help="A system message ahead of the prompt.")
@click.option("--max-tokens", type=click.IntRange(min=1), help="Most tokens of the answer. Default: what fits.")
@click.option(
    "--temperature", type=NumberRange(0, 2), default=0.0, show_default=True, help="0 always takes the likeliest token."
)
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the random draws above temperature 0."
)
@click.option("--raw", is_flag=True, help="Continue the text as it is, without the chat template.")
@click.option("--stats", is_flag=True, help="Print token counts and speed to standard error.")
@with_settings(
    *(
        "model",
        "precision",
        "quantize_activations",
        "compute_precision",
        "cache_dir",
        "max_num_batched_tokens",
        "max_model_len",
    ),
    *("kv_cache_gib", "kv_cache_memory_fraction", "kv_cache_precision", "threads"),
    max_num_seqs=1,
)
def run(settings: Settings, prompt: str, **options: Any) -> None:
    """Answer one PROMPT, streamed to the terminal, without a server. - reads it from standard input."""
    from headrace.launch.local import LocalOptions, answer

    text = sys.stdin.read() if prompt == "-" else prompt
    answer(settings, text, LocalOptions(**options))


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
@with_settings("cache_dir")
def models(settings: Settings, as_json: bool) -> None:
    """List the prepared models and their sizes."""
    from headrace.launch.inventory import print_models

    print_models(settings, as_json)


@main.command()
@with_settings("model", "precision", "cache_dir")
def prepare(settings: Settings) -> None:
    """Prepare a model now, so that a later start is quick. Prints the prepared folder."""
    from headrace.launch.model import prepare_model

    click.echo(prepare_model(settings).folder)


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
@with_settings("cache_dir", "host", "port")
def doctor(settings: Settings, as_json: bool) -> None:
    """Check this machine and installation, and remove what dead servers left in shared memory."""
    from headrace.launch.doctor import examine

    sys.exit(examine(settings, as_json))
