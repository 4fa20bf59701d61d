"""`headrace bench report`: saved reports shown again, or laid side by side.

Owns: the command `report`. Runs in: CLI. Must not know: how reports look or are stored.
"""

from pathlib import Path

import click

EPILOG = """
\b
Examples:
  headrace bench report sweep.json --html sweep.html       draw a saved report again
  headrace bench report before.json after.json             ratios to the first one
  headrace bench report run.json --requests-csv run.csv    each request, for a spreadsheet
"""
_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command(epilog=EPILOG)
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--html", type=_FILE, help="Write one self-contained page with charts.")
@click.option("--csv", type=_FILE, help="Write a line for each result.")
@click.option("--requests-csv", type=_FILE, help="Write a line for each request; needs files saved with their records.")
@click.option("--quiet", is_flag=True, help="Print nothing; only write files.")
def report(files: tuple[Path, ...], html: Path | None, csv: Path | None, requests_csv: Path | None, quiet: bool) -> None:
    """Show reports that other bench commands saved with --json; several FILES are laid side by side.

    Runs made apart are told apart less surely than servers that `bench compare` measured in alternation; the report says so.
    """
    from rich.console import Console

    from headrace.loadtest.report.files import ReportFileError, load_report, save_csv, save_requests_csv
    from headrace.loadtest.report.html import save_html
    from headrace.loadtest.report.saved import compare_saved
    from headrace.loadtest.report.svg import ChartsUnavailableError
    from headrace.loadtest.report.terminal import print_report

    if quiet and not (html or csv or requests_csv):
        raise click.UsageError("--quiet without --html, --csv or --requests-csv would do nothing")
    try:
        shown = compare_saved([(name, load_report(path)) for name, path in zip(_names(files), files, strict=True)])
        if html:
            save_html(shown, html)
        if csv:
            save_csv(shown, csv)
        if requests_csv:
            save_requests_csv(shown, requests_csv)
    except (ReportFileError, ChartsUnavailableError) as error:
        raise click.ClickException(str(error)) from None
    if not quiet:
        print_report(shown, Console())


def _names(files: tuple[Path, ...]) -> list[str]:
    """Short and different: the stem of each file, or as much of its path as tells them apart. Refuses a file given twice."""
    if len({path.resolve() for path in files}) < len(files):
        raise click.UsageError("the same file is given twice")
    stems = [path.name.removesuffix(".gz").removesuffix(".json") for path in files]
    return [stem if stems.count(stem) == 1 else str(path) for stem, path in zip(stems, files, strict=True)]
